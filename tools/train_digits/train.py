"""Trains the digits checkpoint. Stops by the clock; with --resume it goes on from its last state, written once a minute.

    python train.py --clips clips.npz --output DIR --minutes 4 --human 0 --constant-rate           # a start: synthetic voices only
    python train.py --clips clips.npz --output DIR2 --initial DIR --minutes 4                        # all voices
    python train.py --clips clips.npz --output DIR3 --initial DIR --minutes 1 --leave-out george     # for the measurement on unknown speakers

The loss is the text's cross entropy plus two that are dropped afterwards: the digit at each encoder position, and at each audio token the number
of digits that have ended (from the decoder's second layer), which the decoder needs to find the digit that comes next. Both are known because the
strings are composed. Without them a decoder this small takes far longer to find the alignment.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from augment import FRAME_CLASSES, IGNORE, MOST_DIGITS, Composer
from checkpoint import PROMPT, make_model, make_processor, save
from clips import WORDS, Clips
from transformers import GlmAsrForConditionalGeneration

# Windows: (seconds, strings in a batch, share of the steps) until this part of the training. About the same audio in each batch; what the
# model is used on are windows of 30 s.
CURRICULUM = [
    (0.25, [(4, 256, 1.0)]),
    (0.60, [(4, 256, 0.2), (12, 96, 0.8)]),
    (1.00, [(12, 96, 0.5), (30, 40, 0.5)]),
]
CURRICULUM_LATER = [(1.00, [(4, 256, 0.1), (12, 96, 0.4), (30, 40, 0.5)])]  # with --initial


class Trainee(nn.Module):
    """The model with the heads that only training needs."""

    def __init__(self, model, tokenizer):
        super().__init__()
        self.model = model
        self.frame_head = nn.Linear(model.config.audio_config.hidden_size, FRAME_CLASSES)
        self.finished_head = nn.Linear(model.config.text_config.hidden_size, MOST_DIGITS + 1)
        prefix = tokenizer("<|user|>\n<|begin_of_audio|>").input_ids
        suffix = tokenizer(f"<|end_of_audio|><|user|>\n{PROMPT}<|assistant|>\n").input_ids
        words = [tokenizer(word).input_ids[0] for word in WORDS], [tokenizer(" " + word).input_ids[0] for word in WORDS]
        self.register_buffer("prefix", torch.tensor(prefix), persistent=False)
        self.register_buffer("suffix", torch.tensor(suffix), persistent=False)
        self.register_buffer("words", torch.tensor(words), persistent=False)
        self.end = tokenizer.eos_token_id
        model.model.language_model.layers[1].register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.kept = output[0] if isinstance(output, tuple) else output

    def forward(self, batch):
        """The losses: text, frames, finished."""
        size = len(batch.features)
        inner = self.model.model
        encoded = inner.audio_tower(batch.features).last_hidden_state
        audio = inner.multi_modal_projector(encoded.reshape(size, -1, self.model.config.audio_config.intermediate_size))
        tokens = audio.shape[1]

        first = torch.arange(MOST_DIGITS, device=audio.device) > 0
        spoken = batch.digits != IGNORE
        text = self.words[first.long(), batch.digits.clamp(min=0)]
        text = torch.where(spoken, text, torch.full_like(text, self.end))
        end = torch.full((size, 1), self.end, device=audio.device)
        tail = torch.cat([self.suffix.expand(size, -1), text, end], 1)
        position = torch.arange(tail.shape[1], device=audio.device)
        target = torch.cat([tail[:, 1:], end], 1)
        last = len(self.suffix) - 1  # its output is the first word
        wanted = (position >= last) & (position <= last + batch.counts[:, None])
        target = torch.where(wanted, target, torch.full_like(target, IGNORE))

        # Prefix, the window's audio tokens, the rest; then the audio tokens beyond the audio's end are taken out.
        embed = inner.language_model.embed_tokens
        everything = torch.cat([embed(self.prefix).expand(size, -1, -1).to(audio.dtype), audio, embed(tail).to(audio.dtype)], 1)
        place = torch.arange(everything.shape[1], device=audio.device).expand(size, -1)
        begin, valid = len(self.prefix), batch.audio_tokens[:, None]
        source = torch.where(place < begin + valid, place, place + tokens - valid).clamp(max=everything.shape[1] - 1)
        hidden = inner.language_model(
            inputs_embeds=everything.gather(1, source[..., None].expand_as(everything)), use_cache=False
        ).last_hidden_state
        tail_hidden = hidden.gather(1, (begin + valid + position)[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self.model.lm_head(tail_hidden)

        finished = torch.where(torch.arange(tokens, device=audio.device) < valid, batch.finished, torch.full_like(batch.finished, IGNORE))
        return (
            cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORE),
            cross_entropy(self.frame_head(encoded).float().flatten(0, 1), batch.frame_classes.flatten(), ignore_index=IGNORE),
            cross_entropy(self.finished_head(self.kept[:, begin : begin + tokens]).float().flatten(0, 1), finished.flatten(), ignore_index=IGNORE),
        )


def chosen_clips(args):
    clips = Clips.load(args.clips)
    keep = ~clips.test
    if args.human == 0:
        keep &= clips.synthetic
    if args.leave_out:
        voices = np.array(clips.voices)
        if args.leave_out not in voices:
            raise SystemExit(f"--leave-out {args.leave_out}: there are {', '.join(sorted(set(voices[~clips.synthetic])))}")
        keep &= voices != args.leave_out
    return clips.select(keep)


def learning_rate(args, step, progress):
    """Linear warm-up, constant, and over the last 60 % down to a hundredth unless it is to stay constant."""
    decay = 1.0 if args.constant_rate else min(1.0, max(0.01, (1 - progress) / 0.6))
    return args.learning_rate * min(1.0, (step + 1) / 200) * decay


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--initial", type=Path, help="folder of an earlier training to start from")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --output, if there is one")
    parser.add_argument("--minutes", type=float, required=True, help="of training, those before --resume included")
    parser.add_argument("--human", type=float, default=0.65, help="share of strings spoken by FSDD's speakers")
    parser.add_argument("--leave-out", help="a speaker whose recordings are not used")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--constant-rate", action="store_true")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="smaller batches, for a try on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    processor = make_processor()
    trainee = Trainee(make_model(processor.tokenizer), processor.tokenizer).to(device).train()
    if args.initial:
        trainee.load_state_dict(torch.load(args.initial / "state.pt", map_location=device)["trainee"])
    matrices = [p for p in trainee.parameters() if p.dim() > 1]
    others = [p for p in trainee.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    step, before = 0, 0.0
    if args.resume and (args.output / "state.pt").exists():
        state = torch.load(args.output / "state.pt", map_location=device)
        trainee.load_state_dict(state["trainee"])
        optimizer.load_state_dict(state["optimizer"])
        step, before = state["step"], state["seconds"]
    composer = Composer(chosen_clips(args), device, args.human, seed=args.seed + step)
    args.output.mkdir(parents=True, exist_ok=True)

    def write_state(seconds):
        state = {"trainee": trainee.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
        torch.save(state, args.output / "state.new")
        os.replace(args.output / "state.new", args.output / "state.pt")

    curriculum = CURRICULUM_LATER if args.initial else CURRICULUM
    choice = np.random.default_rng(args.seed + step)
    began, saved, losses = time.monotonic(), time.monotonic(), []
    log = open(args.output / "log.jsonl", "a")
    while True:
        seconds = before + time.monotonic() - began
        progress = seconds / (60 * args.minutes)
        if progress >= 1:
            break
        windows = next(w for until, w in curriculum if progress < until)
        window, size, _ = windows[choice.choice(len(windows), p=[share for *_, share in windows])]
        with torch.no_grad():
            batch = composer.batch(max(1, round(size * args.batch_scale)), window)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            text, frames, finished = trainee(batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step, progress)
        optimizer.zero_grad(set_to_none=True)
        (text + 0.5 * frames + 0.3 * finished).backward()
        norm = nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses.append(torch.stack([text.detach(), frames.detach(), finished.detach(), norm.detach()]))
        if len(losses) == (50 if device.type == "cuda" else 5):
            mean = [round(x, 4) for x in torch.stack(losses).mean(0).tolist()]
            line = {"step": step, "seconds": round(seconds, 1), "text": mean[0], "frames": mean[1], "finished": mean[2], "norm": mean[3]}
            log.write(json.dumps(line) + "\n")
            log.flush()
            if step % 250 == 0 or device.type == "cpu":
                print(json.dumps(line), flush=True)
            losses = []
            if time.monotonic() - saved > 60:
                write_state(seconds)
                saved = time.monotonic()
    write_state(seconds)
    save(trainee.model.float(), processor, args.output / "checkpoint")
    print(f"{args.output}: {step} steps, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
