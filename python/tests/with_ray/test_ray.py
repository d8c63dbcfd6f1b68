"""Corpora on a local Ray cluster with two workers, on the bundled checkpoint and recordings."""

import json
import os
import pathlib
import shutil
import sys
import time

import pytest

os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise other programs, such as a build, keep them from starting
ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
fsspec = pytest.importorskip("fsspec")
import pyarrow  # noqa: E402
import pyarrow.fs  # noqa: E402
import pyarrow.parquet  # noqa: E402
import tilewave.ray  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODEL = ROOT / "assets/digits"
DIGITS = ROOT / "tests/data/digits"
SPOKEN = dict(line.split(None, 1) for line in (ROOT / "assets/samples/transcripts.txt").read_text().splitlines())


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture
def corpus(tmp_path):
    """The samples in two directories, and files that cannot be transcribed."""
    (tmp_path / "corpus/more").mkdir(parents=True)
    for i, name in enumerate(sorted(SPOKEN)):
        shutil.copy(ROOT / "assets/samples" / name, tmp_path / "corpus" / ("more" if i % 2 else ".") / name)
    (tmp_path / "corpus/empty.wav").write_bytes(b"")
    (tmp_path / "corpus/more/[damaged].FLAC").write_bytes(b"fLaC and nothing of it")
    (tmp_path / "corpus/transcripts.txt").write_text("not audio")
    (tmp_path / "corpus/.trash").mkdir()
    for hidden in ("._digits-1.wav", ".trash/digits-1.wav"):
        (tmp_path / "corpus" / hidden).write_bytes(b"what no search of a directory finds")
    return tmp_path / "corpus"


def transcribed(source, **options):
    rows = tilewave.ray.transcribe_dataset(source, MODEL, **{"device": "cpu", "num_engines": 2, "cpus_per_engine": 1, **options}).take_all()
    return {row["path"]: row for row in rows}


def names(rows):
    return sorted(pathlib.PurePath(path).name for path in rows)


def test_a_directory(corpus):
    rows = transcribed(corpus)
    assert names(rows) == sorted([*SPOKEN, "empty.wav", "[damaged].FLAC"])
    transcriber = tilewave.Transcriber(MODEL, device="cpu")
    for path, row in rows.items():
        assert os.path.isabs(path)
        name = pathlib.Path(path).name
        if name in SPOKEN:
            assert (row["text"], row["error"]) == (SPOKEN[name], None)
            wanted = transcriber(path)
            fields = ("begin", "end", "text", "truncated", "repetition")
            assert row["segments"] == [{field: getattr(segment, field) for field in fields} for segment in wanted.segments]
            assert row["duration"] == pytest.approx(tilewave.read_audio(path).size / 16000)
        else:
            assert row["error"].startswith(f"OSError: {path}: ") and row["text"] is row["segments"] is row["duration"] is None


class Meeting(tilewave.ray._Worker):
    """Works when both engines do."""

    def __call__(self, table):
        met = pathlib.Path(table["path"][0].as_py()).parent / "met"
        met.mkdir(exist_ok=True)
        (met / str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len(list(met.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return super().__call__(table).append_column("pid", pyarrow.array([os.getpid()] * len(table)))


def test_two_engines(tmp_path, monkeypatch):
    """Both work, and every file gets its own text."""
    spoken = {}
    for line in (DIGITS / "transcripts.txt").read_text().splitlines():
        name, text = line.split(None, 1)
        for copy in range(4):
            path = tmp_path / f"{copy}-{name}"
            path.symlink_to(DIGITS / name)
            spoken[str(path)] = text
    monkeypatch.setattr(tilewave.ray, "_Worker", Meeting)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    rows = transcribed(str(tmp_path / "*.flac"))
    assert {path: row["text"] for path, row in rows.items()} == spoken
    assert len({row["pid"] for row in rows.values()}) == 2


@pytest.mark.parametrize(
    "source, filesystem",
    [
        (lambda corpus: f"file://{corpus}", lambda corpus: None),
        (lambda corpus: "more", lambda corpus: fsspec.filesystem("dir", path=str(corpus), fs=fsspec.filesystem("file"))),
        (lambda corpus: ["more"], lambda corpus: pyarrow.fs.SubTreeFileSystem(str(corpus), pyarrow.fs.LocalFileSystem())),
    ],
)
def test_filesystems(corpus, source, filesystem):
    rows = transcribed(source(corpus), filesystem=filesystem(corpus))
    found = {pathlib.PurePath(path).name: row["text"] for path, row in rows.items()}
    wanted = {name: text for name, text in SPOKEN.items() if (corpus / "more" / name).exists() or "file:" in source(corpus)}
    assert {name: text for name, text in found.items() if text is not None} == wanted
    assert all(path.startswith("file:///" if "file:" in source(corpus) else "more/") for path in rows)


def test_missing_files_are_rows(corpus):
    good = corpus / "digits-1.wav"
    assert good.exists()
    rows = transcribed([good, corpus / "missing.wav", corpus / "more/[damaged].FLAC"])
    assert rows[str(good)]["text"] == SPOKEN["digits-1.wav"]
    assert rows[str(corpus / "missing.wav")]["error"].startswith("FileNotFoundError: ")
    assert rows[str(corpus / "more/[damaged].FLAC")]["error"].startswith("OSError: ")


def test_datasets_keep_their_columns(corpus):
    source = ray.data.read_binary_files(str(corpus), include_paths=True).map(lambda row: {**row, "speaker": row["path"][-5:]})
    rows = transcribed(source)
    assert names(rows) == sorted([*SPOKEN, "empty.wav", "[damaged].FLAC", "transcripts.txt"])
    for path, row in rows.items():
        assert row["text"] == SPOKEN.get(pathlib.Path(path).name) and row["speaker"] == path[-5:] and "bytes" not in row
        assert (row["error"] is None) == (row["text"] is not None)
    rows = transcribed(ray.data.from_items([{"path": str(corpus / "digits-1.wav"), "id": 7}, {"path": "nosuchscheme://a", "id": 8}]))
    assert {row["id"]: row["text"] for row in rows.values()} == {7: SPOKEN["digits-1.wav"], 8: None}
    assert rows["nosuchscheme://a"]["error"].startswith("ValueError: ")


def test_resuming(corpus, tmp_path):
    record = tmp_path / "record"
    first = transcribed(corpus, resume=record)
    parts = {part: part.stat().st_mtime_ns for part in record.glob("part-*.parquet")}
    assert parts
    # Nothing that was finished is done again: these files are gone. What failed is.
    for path, row in first.items():
        if row["error"] is None:
            os.remove(path)
    shutil.copy(ROOT / "assets/samples/digits-1.wav", corpus / "empty.wav")
    shutil.copy(ROOT / "assets/samples/digits-2.wav", corpus / "new.wav")
    second = transcribed([*first, corpus / "new.wav"], resume=record)
    assert second.keys() == first.keys() | {str(corpus / "new.wav")}
    for path, row in first.items():
        if row["error"] is None:
            assert second[path] == row
    assert second[str(corpus / "empty.wav")]["text"] == SPOKEN["digits-1.wav"]
    assert second[str(corpus / "new.wav")]["text"] == SPOKEN["digits-2.wav"]
    assert second[str(corpus / "more/[damaged].FLAC")]["error"] == first[str(corpus / "more/[damaged].FLAC")]["error"]
    for part, written in parts.items():
        assert part.stat().st_mtime_ns == written
    # All is finished: no engine starts, and none would with this model's name and options.
    everything = [path for path, row in second.items() if row["error"] is None]
    assert transcribed(everything, resume=record).keys() == set(everything)
    # A Dataset skips the same.
    source = ray.data.from_items([{"path": path} for path in first])
    again = transcribed(source, resume=record)
    assert {path: row["text"] for path, row in again.items()} == {path: row["text"] for path, row in second.items()}
    assert json.loads((record / "options.json").read_text())["directory"] == str(MODEL)
    with pytest.raises(ValueError, match="prompt was None and is 'Digits.'"):
        transcribed(corpus, resume=record, prompt="Digits.")


def test_an_interrupted_run_is_resumed(corpus, tmp_path):
    """What a call of an engine finished is recorded before the run ends."""
    record = tmp_path / "record"
    rows = tilewave.ray.transcribe_dataset(corpus, MODEL, device="cpu", num_engines=1, cpus_per_engine=1, batch_size=1, resume=record)
    for row in rows.iter_rows():
        if row["error"] is None:
            break  # the rest is not waited for
    recorded = {path for part in record.glob("part-*.parquet") for path in pyarrow.parquet.read_table(part)["path"].to_pylist()}
    assert recorded
    (record / ".partial-0123").write_bytes(b"cut off")
    assert names(transcribed(corpus, resume=record)) == sorted([*SPOKEN, "empty.wav", "[damaged].FLAC"])


def test_a_model_that_cannot_be_loaded_fails_the_job(corpus):
    with pytest.raises(Exception, match="nonexistent"):
        tilewave.ray.transcribe_dataset(corpus, "/nonexistent", device="cpu", num_engines=1, cpus_per_engine=1).take_all()


@pytest.mark.parametrize(
    "source, options, part",
    [
        ([], {}, "no audio files"),
        (3, {}, "int"),
        ([3], {}, "source has a int; allowed: paths"),
        ("/nonexistent/*.wav", {}, "no audio files"),
        ("nosuchscheme://a/b.wav", {}, "source has nosuchscheme://a/b.wav, for which there is no filesystem"),
        (ROOT, {"device": "tpu"}, 'device is "tpu"'),
        (ROOT, {"device": "cuda"}, "no GPUs"),
        (ROOT, {"num_engines": 0}, "num_engines is 0"),
        (ROOT, {"batch": 257}, "batch is 257"),
        (ROOT, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (ROOT, {"top_p": 0}, "top_p is 0.0"),
    ],
)
def test_bad_arguments(source, options, part):
    with pytest.raises((TypeError, ValueError), match=part):
        tilewave.ray.transcribe_dataset(source, MODEL, **options)


def test_datasets_without_what_is_needed(tmp_path):
    with pytest.raises(ValueError, match="source has the columns a; needed: bytes or path"):
        tilewave.ray.transcribe_dataset(ray.data.from_items([{"a": 1}]), MODEL)
    with pytest.raises(ValueError, match="no column path, which resume needs"):
        tilewave.ray.transcribe_dataset(ray.data.from_items([{"bytes": b""}]), MODEL, resume=tmp_path)
    rows = tilewave.ray.transcribe_dataset(
        ray.data.from_items([{"bytes": (ROOT / "assets/samples/digits-1.wav").read_bytes()}, {"bytes": None}]),
        MODEL,
        device="cpu",
        num_engines=1,
        cpus_per_engine=1,
    ).take_all()
    assert sorted((row["text"] or "", row["error"] or "") for row in rows) == [
        ("", "ValueError: bytes and path are null"),
        (SPOKEN["digits-1.wav"], ""),
    ]
