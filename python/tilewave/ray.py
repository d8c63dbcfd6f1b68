"""Speech to text for whole corpora, on Ray Data: one engine for each GPU, or for a share of the CPUs.

    import tilewave.ray

    rows = tilewave.ray.transcribe_dataset("s3://bucket/recordings", "/models/glm-asr-nano", resume="/shared/transcripts")
    rows.write_parquet("s3://bucket/transcripts")

Ray is an optional dependency: pip install "tilewave[ray]".
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import math
import os
import threading
from typing import TYPE_CHECKING, Any, Sequence

from . import _library, _speech
from .engine import Engine

if TYPE_CHECKING:
    import ray.data

#: What a directory is searched for, in any case. Files that are named one by one may have any name.
EXTENSIONS = frozenset("aac aif aiff flac m4a mka mkv mov mp3 mp4 oga ogg opus wav webm wma".split())

_OPTIONS_FILE = "options.json"
_BATCHES_PER_CALL = 4  # of the engine: few enough rows to spread, and enough to keep its batch full
_CALLS_PER_ENGINE = 4  # where there are few files: engines that get the short ones take more
_SAMPLES_IN_FLIGHT = 2 * 3600 * _speech.SAMPLE_RATE  # decoded audio that an engine holds, 460 MB


def transcribe_dataset(
    source: ray.data.Dataset | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "plain",
    mmproj: str | os.PathLike[str] | None = None,
    num_engines: int | None = None,
    cpus_per_engine: int | None = None,
    batch: int = 0,
    batch_size: int | None = None,
    readers: int = 8,
    filesystem: Any = None,
    resume: str | os.PathLike[str] | None = None,
    segmentation: bool = True,
    prompt: str | None = None,
    max_new_tokens: int = 500,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> ray.data.Dataset:
    """A dataset with one row for each recording, in no particular order:

        path       as in `source`; local ones absolute
        text       null if there is an error
        segments   a list of {begin, end, text, truncated, repetition}; begin and end in seconds
        duration   of the audio, in seconds
        error      null, or the exception's name and message: a missing, damaged or unsupported file fails alone

    source: a file, a directory (all audio files in it and in its directories, hidden ones left out), a pattern with *, ? or [...], or a list of these; or a Dataset
    with a column `bytes` (ray.data.read_binary_files(..., include_paths=True)) or `path`. Other columns of a Dataset are kept.
    filesystem: of the paths, pyarrow's or fsspec's. Without it, URIs such as s3:// and gs:// choose theirs, and other paths are local: every
    node must see them. model, dtype, weights, mmproj: as Transcriber's; every node must have the model under that path.

    num_engines: processes with a loaded model each. Default: one for each GPU of the cluster; on the CPU one for each node. device: "cpu",
    "cuda", or "auto", which is "cuda" if the cluster has GPUs. cpus_per_engine: CPUs that an engine reserves, on the CPU also its threads;
    default: 1 with a GPU, otherwise its share of the cluster's. All engines together leave Ray one CPU. batch: sequences that are
    decoded together, as Engine's. batch_size: rows per call, default 4 times as many. readers: threads of an engine that read and decode files.

    resume: a directory, local or a URI, that every node can write to. Each call of an engine records its rows there; rows with an error are
    not recorded. A later run with the same directory and the same options skips the recorded paths, and its result has their rows, too. Run one
    at a time.

    Nothing is transcribed until the dataset is consumed; materialize() does that once. The job fails if the model cannot be loaded or a GPU fails.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(f'tilewave.ray needs Ray Data: pip install "tilewave[ray]" ({error})') from error

    is_dataset = isinstance(source, ray.data.Dataset)
    for name, number in (
        ("num_engines", num_engines),
        ("cpus_per_engine", cpus_per_engine),
        ("batch_size", batch_size),
        ("readers", readers),
    ):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is {number!r}; allowed: an integer, at least 1")
    if not isinstance(batch, int) or not 0 <= batch <= 256:
        raise ValueError(f"batch is {batch!r}; allowed: 0 to 256")
    request = {
        "segmentation": bool(segmentation),
        "prompt": prompt,
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "top_p": float(top_p),
        "seed": seed,
    }
    _speech.transcribe_options(*(request[n] for n in ("segmentation", "prompt", "max_new_tokens")), 0, temperature, top_p, seed, None, [])
    load = {
        "directory": None if model is None else _local(model),
        "dtype": dtype,
        "weights": weights,
        "mmproj": None if mmproj is None else _local(mmproj),
    }

    if not ray.is_initialized():
        ray.init()
    cluster = ray.cluster_resources()
    if device == "auto":
        device = "cuda" if cluster.get("GPU", 0) >= 1 else "cpu"
    elif device not in ("cpu", "cuda"):
        raise ValueError(f'device is "{device}"; allowed: "auto", "cpu", "cuda": Ray gives each engine a GPU of its own')
    if device == "cuda" and cluster.get("GPU", 0) < 1:
        raise ValueError('device is "cuda", but the Ray cluster has no GPUs')
    if num_engines is None:
        num_engines = int(cluster["GPU"]) if device == "cuda" else sum(node["Alive"] for node in ray.nodes())
    if cpus_per_engine is None:
        share = int(cluster.get("CPU", 1)) // num_engines
        cpus_per_engine = 1 if device == "cuda" else max(1, share)
    # Reading and filtering take a CPU. With none left the job would wait for ever.
    reserved = min(cpus_per_engine, max(0.0, cluster.get("CPU", 1) - 1) / num_engines)
    reserved = math.floor(reserved) if reserved > 1 else round(reserved, 2)  # Ray takes fractions below 1 alone
    batch_size = batch_size or _BATCHES_PER_CALL * (batch or (64 if device == "cuda" else 16))

    record = None if resume is None else _Record(_local(resume))
    done = recorded = None
    if record is not None:
        record.check_options({**load, **request})
        done = record.paths()
        recorded = record.dataset()

    if is_dataset:
        columns = source.schema().names
        if "bytes" not in columns and "path" not in columns:
            raise ValueError(f"source has the columns {', '.join(columns)}; needed: bytes or path")
        if record is not None and "path" not in columns:
            raise ValueError("source has no column path, which resume needs; read_binary_files(..., include_paths=True) adds it")
        rows = source
        if recorded is not None:
            finished = ray.put(done)

            def unfinished(table):
                import pyarrow.compute

                return table.filter(pyarrow.compute.invert(pyarrow.compute.is_in(table["path"], value_set=ray.get(finished))))

            rows = source.map_batches(unfinished, batch_format="pyarrow", batch_size=None)
    else:
        paths = _expand(source, filesystem)
        if recorded is not None:
            skipped = set(done.to_pylist())
            paths = [path for path in paths if path not in skipped]
            if not paths:
                return recorded
        if not paths:
            raise ValueError(f"source is {source!r}, which has no audio files ({', '.join(sorted(EXTENSIONS))})")
        batch_size = max(1, min(batch_size, math.ceil(len(paths) / (num_engines * _CALLS_PER_ENGINE))))
        rows = ray.data.from_items([{"path": path} for path in paths], override_num_blocks=math.ceil(len(paths) / batch_size))

    transcribed = rows.map_batches(
        _Worker,
        fn_constructor_kwargs={
            "load": {**load, "device": device, "batch": batch},
            "request": request,
            "threads": cpus_per_engine if device == "cpu" else None,
            "readers": readers,
            "filesystem": filesystem,
            "record": record,
        },
        batch_format="pyarrow",
        batch_size=batch_size if is_dataset else None,
        # The next rows are there before the last of these end.
        compute=ray.data.ActorPoolStrategy(size=num_engines, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True),
        num_cpus=reserved,
        num_gpus=1 if device == "cuda" else None,
    )
    return transcribed if recorded is None else recorded.union(transcribed)


class _Worker:
    """An engine in a process of Ray's."""

    def __init__(self, load, request, threads, readers, filesystem, record):
        if threads is not None:
            _library.set_cpu_threads(threads)
        self.engine = Engine(queue=1 << 20, **load)  # the budget limits the queue
        self.request, self.filesystem, self.record = request, filesystem, record
        self.readers = concurrent.futures.ThreadPoolExecutor(readers)
        self.budget = _Budget(_SAMPLES_IN_FLIGHT)

    def __call__(self, table):
        import pyarrow

        contents = table["bytes"] if "bytes" in table.column_names else [None] * len(table)
        paths = table["path"].to_pylist() if "path" in table.column_names else [None] * len(table)
        submitted = [self.readers.submit(self._submit, path, content) for path, content in zip(paths, contents)]
        results = [self._result(each) for each in submitted]
        kept = [name for name in table.column_names if name != "bytes" and name not in _schema().names]
        columns = {name: table[name] for name in kept}
        columns["path"] = pyarrow.array(paths, pyarrow.string())
        for field in _schema():
            columns[field.name] = pyarrow.array([result.get(field.name) for result in results], field.type)
        result = pyarrow.table(columns)
        if self.record is not None:
            self.record.write(result.filter(pyarrow.array([row.get("error") is None for row in results])))
        return result

    def _submit(self, path, content):
        """The duration in seconds, and a future."""
        if content is not None:
            content = content.as_py()
        elif path is not None:
            content = _read(path, self.filesystem)
        if content is None:
            raise ValueError("bytes and path are null")
        samples = _speech.read_audio(content, name=path or "audio")
        content = None  # a batch of files need not stay in memory
        self.budget.take(samples.size)
        try:
            future = self.engine.submit(samples, **self.request)
        except BaseException:
            self.budget.give(samples.size)
            raise
        count = samples.size
        future.add_done_callback(lambda done: self.budget.give(count))
        return count / _speech.SAMPLE_RATE, future

    def _result(self, submitted) -> dict[str, Any]:
        try:
            duration, future = submitted.result()
            transcript = future.result()
        except (_library.DeviceError, _library.CompileError, ImportError):
            raise  # not this file's fault
        except Exception as error:
            if self.engine.failure is not None:
                raise
            return {"error": f"{type(error).__name__}: {error}"}
        segments = [
            {"begin": s.begin, "end": s.end, "text": s.text, "truncated": s.truncated, "repetition": s.repetition}
            for s in transcript.segments
        ]
        return {"text": transcript.text, "segments": segments, "duration": duration}


@functools.cache
def _schema():
    """Of the columns that a transcript adds."""
    import pyarrow as pa

    segment = pa.struct(
        [("begin", pa.float64()), ("end", pa.float64()), ("text", pa.string()), ("truncated", pa.bool_()), ("repetition", pa.bool_())]
    )
    return pa.schema([("text", pa.string()), ("segments", pa.list_(segment)), ("duration", pa.float64()), ("error", pa.string())])


class _Budget:
    """Samples that are decoded and not yet transcribed. One recording may exceed it alone."""

    def __init__(self, most: int):
        self.most, self.used, self.changed = most, 0, threading.Condition()

    def take(self, count: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.used == 0 or self.used + count <= self.most)
            self.used += count

    def give(self, count: int) -> None:
        with self.changed:
            self.used -= count
            self.changed.notify_all()


class _Record:
    """Finished rows in a directory: a Parquet file for each call of an engine, which appears when it is complete."""

    def __init__(self, directory: str):
        self.directory = directory
        filesystem, path = _resolve(directory, None)
        filesystem.create_dir(path, recursive=True)

    def check_options(self, options: dict[str, Any]) -> None:
        filesystem, directory = _resolve(self.directory, None)
        file = f"{directory}/{_OPTIONS_FILE}"
        try:
            with filesystem.open_input_stream(file) as stream:
                earlier = json.loads(stream.read())
        except FileNotFoundError:
            self._write(file, json.dumps(options, indent=1).encode())
            return
        differing = [name for name in options if options[name] != earlier.get(name)]
        if differing:
            different = "; ".join(f"{name} was {earlier.get(name)!r} and is {options[name]!r}" for name in differing)
            raise ValueError(f"resume is {self.directory}, whose rows were made with other options: {different}")

    def _parts(self) -> list[str]:
        import pyarrow.fs

        filesystem, directory = _resolve(self.directory, None)
        files = filesystem.get_file_info(pyarrow.fs.FileSelector(directory))
        return sorted(file.path for file in files if file.base_name.startswith("part-") and file.base_name.endswith(".parquet"))

    def paths(self):
        """Those of the finished rows, as a pyarrow array."""
        import pyarrow
        import pyarrow.parquet

        filesystem, _ = _resolve(self.directory, None)
        tables = [pyarrow.parquet.read_table(part, columns=["path"], filesystem=filesystem) for part in self._parts()]
        return pyarrow.concat_tables(tables)["path"].combine_chunks() if tables else pyarrow.array([], pyarrow.string())

    def dataset(self):
        """The finished rows; None if there are none."""
        import ray.data

        parts = self._parts()
        if not parts:
            return None
        return ray.data.from_items([{"part": part} for part in parts]).map_batches(self._read, batch_format="pyarrow", batch_size=None)

    def _read(self, parts):
        import pyarrow
        import pyarrow.parquet

        filesystem, _ = _resolve(self.directory, None)
        return pyarrow.concat_tables(pyarrow.parquet.read_table(part, filesystem=filesystem) for part in parts["part"].to_pylist())

    def write(self, table) -> None:
        import pyarrow
        import pyarrow.parquet

        if len(table) == 0:
            return
        # The name follows from the rows, so that a call that Ray repeats replaces its own file.
        name = hashlib.sha256("\0".join(sorted(map(str, table["path"].to_pylist()))).encode()).hexdigest()[:32]
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink)
        self._write(f"{_resolve(self.directory, None)[1]}/part-{name}.parquet", sink.getvalue())

    def _write(self, file: str, content) -> None:
        """The file appears when it is complete."""
        filesystem, directory = _resolve(self.directory, None)
        partial = f"{directory}/.partial-{os.urandom(8).hex()}"
        with filesystem.open_output_stream(partial) as stream:
            stream.write(content)
        filesystem.move(partial, file)


def _local(path) -> str:
    """Absolute, because processes of Ray's have other working directories. URIs stay."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(path)


@functools.cache
def _root(scheme: str, host: str):
    """The filesystem of a URI, and the path of scheme://host/ in it."""
    import pyarrow
    import pyarrow.fs

    try:
        filesystem, path = pyarrow.fs.FileSystem.from_uri(f"{scheme}://{host}/")
        return filesystem, path.rstrip("/")
    except pyarrow.ArrowInvalid:  # one that pyarrow does not have
        import fsspec

        url = f"{scheme}://{host}"
        filesystem, _ = fsspec.core.url_to_fs(url)
        wrapped = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem))
        return wrapped, filesystem._strip_protocol(url).rstrip("/")


def _resolve(path: str, filesystem):
    """pyarrow's filesystem, and the path in it."""
    import pyarrow.fs

    scheme, separator, rest = path.partition("://")
    if filesystem is not None:
        if not isinstance(filesystem, pyarrow.fs.FileSystem):
            filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem))
        return filesystem, rest if separator else path
    if not separator:
        return pyarrow.fs.LocalFileSystem(), os.path.abspath(path)
    host, _, rest = rest.partition("/")
    filesystem, root = _root(scheme, host)
    return filesystem, f"{root}/{rest}"


def _read(path: str, filesystem) -> bytes:
    filesystem, path = _resolve(path, filesystem)
    with filesystem.open_input_stream(path) as stream:
        return stream.read()


def _hidden(path: str) -> bool:
    """Whether the file or a folder on its way is, such as .Trash/talk.wav, or ._talk.wav, which is no recording."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def _expand(source, filesystem) -> list[str]:
    """The files that `source` names. A name without a file is kept, and becomes a row with an error."""
    import pyarrow.fs

    names = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    paths: dict[str, None] = {}  # in order, each once
    for name in names:
        if not isinstance(name, (str, os.PathLike)):
            raise TypeError(f"source has a {type(name).__name__}; allowed: paths")
        given = os.fspath(name) if filesystem is not None else _local(name)
        try:
            place, inside = _resolve(given, filesystem)
        except (ImportError, ValueError) as error:
            raise ValueError(f"source has {given}, for which there is no filesystem: {error}") from error
        before = given.removesuffix(inside)  # the scheme, and what else paths in `place` do not have
        kind = place.get_file_info(inside).type
        if kind == pyarrow.fs.FileType.NotFound and any(c in inside for c in "*?["):
            from fsspec.implementations.arrow import ArrowFSWrapper

            found = [path for path in ArrowFSWrapper(place).glob(inside) if place.get_file_info(path).type == pyarrow.fs.FileType.File]
            paths.update(dict.fromkeys(before + path for path in sorted(found)))
        elif kind == pyarrow.fs.FileType.Directory:
            files = place.get_file_info(pyarrow.fs.FileSelector(inside, recursive=True))
            wanted = (file.path for file in files if file.type == pyarrow.fs.FileType.File and file.extension.lower() in EXTENSIONS)
            paths.update(dict.fromkeys(before + path for path in sorted(wanted) if not _hidden(path.removeprefix(inside))))
        else:
            paths[given] = None
    return list(paths)
