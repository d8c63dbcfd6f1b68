"""Word error of a checkpoint on composed strings, with transformers: AutoProcessor, GlmAsrForConditionalGeneration and greedy generate().

    python evaluate.py --clips clips.npz --checkpoint ../../assets/digits --sets unseen synthetic silence --results results/digits.json
    python evaluate.py --clips clips.npz --leave-one-out DIR --results results/leave_one_out.json   # DIR/{speaker}/checkpoint

Word error is (substitutions + deletions + insertions) / words of the transcripts, over all strings of a set together. For `silence`, which has no
words, it is the share of recordings whose text is not empty.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoProcessor, GlmAsrForConditionalGeneration

from clips import Clips
from generate import test_set


def edit_distance(reference, hypothesis):
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]


@torch.inference_mode()
def transcribe(model, processor, recordings, batch):
    texts = []
    for i in range(0, len(recordings), batch):
        inputs = processor.apply_transcription_request(recordings[i : i + batch]).to(model.device, model.dtype)
        output = model.generate(**inputs, do_sample=False)
        texts += processor.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return texts


def measure(folder, clips, name, args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor = AutoProcessor.from_pretrained(folder)
    model = GlmAsrForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    strings = test_set(clips, name, args.strings, args.seed)
    texts = transcribe(model, processor, [samples for samples, _ in strings], args.batch)
    result = {"set": name, "strings": len(strings), "seed": args.seed}
    if name == "silence":
        result["not_empty"] = sum(text != "" for text in texts) / len(texts)
    else:
        words = sum(len(text.split()) for _, text in strings)
        errors = sum(edit_distance(text.split(), got.split()) for (_, text), got in zip(strings, texts))
        wrong = [{"expected": text, "got": got} for (_, text), got in zip(strings, texts) if text != got]
        result |= {"words": words, "errors": errors, "word_error": round(errors / words, 5), "strings_wrong": len(wrong), "first_wrong": wrong[:10]}
    print(json.dumps({key: value for key, value in result.items() if key != "first_wrong"}), flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--sets", nargs="+", default=["unseen", "synthetic", "silence"])
    parser.add_argument("--leave-one-out", type=Path, help="folder with a training for each speaker left out")
    parser.add_argument("--strings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()

    clips = Clips.load(args.clips)
    report = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "dtype": "float32"}
    if args.leave_one_out:
        folders = sorted(args.leave_one_out.glob("*/checkpoint"))
        report["sets"] = [measure(folder, clips, folder.parent.name, args) for folder in folders]
        report["mean_word_error"] = round(sum(r["word_error"] for r in report["sets"]) / len(report["sets"]), 5)
        print(f"mean word error of {len(folders)} speakers: {report['mean_word_error']}")
    else:
        report["sets"] = [measure(args.checkpoint, clips, name, args) for name in args.sets]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
