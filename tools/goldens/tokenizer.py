#!/usr/bin/env python3
"""Writes tests/data/tokenizer/: small tokenizer.json files, and texts with the ids and the decoded texts that Hugging Face's `tokenizers` gives.

    pip install tokenizers==0.23.3
    tools/goldens/tokenizer.py [DIRECTORY] [--texts N] [--seed S]

Each NAME.json is a tokenizer, NAME.goldens.json an array of [text, options, ids, decoded, decoded without special tokens]; options: 1 = special tokens are
parsed, 2 = special tokens are added. The tokenizers are trained on text made here; nothing is downloaded.
"""
import argparse
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GLM4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # Llama 3's is the same
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and it's 1234567 times faster than we'd thought.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; das weiß jeder.",
    "Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "我能吞下玻璃而不伤身体。今天天气很好，我们去公园散步吧。",
    "いろはにほへと ちりぬるを。カタカナも少し書きます。",
    "다람쥐 헌 쳇바퀴에 타고파. 오늘은 날씨가 좋습니다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "Đây là một câu tiếng Việt có nhiều dấu thanh điệu.",
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 3 == 0]\r\n\r\n",
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️ emoji — “quotes” … and dashes – here",
]


def corpus(rng):
    words = [w for s in SENTENCES for w in s.split(" ")]
    for _ in range(300):
        yield " ".join(rng.choice(words) for _ in range(rng.randint(3, 15)))
    for _ in range(4):
        yield from SENTENCES


ALPHABETS = [
    [(0x20, 0x7E)], [(0x20, 0x7E)], [(0x61, 0x7A)], [(0x30, 0x39)], [(0xA0, 0x24F)], [(0x300, 0x36F), (0x61, 0x7A), (0x1AB0, 0x1ACE)],
    [(0x370, 0x52F)], [(0x590, 0x6FF)], [(0x900, 0xDFF)], [(0xE00, 0x11FF)], [(0x1E00, 0x20CF)], [(0x2100, 0x2BFF)],
    [(0x3040, 0x30FF), (0x4E00, 0x9FFF)], [(0xAC00, 0xD7A3), (0x1100, 0x11FF)], [(0xF900, 0xFAFF), (0xFB00, 0xFDFF)], [(0xFE00, 0xFFFD)],
    [(0x10000, 0x11FFF)], [(0x12000, 0x1D7FF)], [(0x1F300, 0x1FAFF)], [(0x20000, 0x323AF)], [(0xE0001, 0xE01EF)], [(0xF0000, 0x10FFFD)],
    [(0x660, 0x669), (0x966, 0x96F), (0xFF10, 0xFF19), (0x1D7CE, 0x1D7FF), (0xB2, 0xB3), (0x2460, 0x249B), (0x2160, 0x217F)],
    [(0, 0x10FFFF)], [(0, 0x2FFF)],
]
SPACES = "      \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u180e\u2000\u2003\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
PIECES = ["'s", "'S", "'LL", "'re", "'ſ", "\r\n", "\n\n", "  ", "\u0301", "\u200d", "\ufe0f", "👩‍🚀", "🇩🇪", "e\u0301", "Å", "ﬁ", "가", "각", "ſ", "İ", "K", "123", "4567",
          "…", "<", "|", ">", "<|", "|>", "\0", "\ufffd", " a", "_", "-"]


def random_text(rng, added):
    parts = []
    for _ in range(rng.randint(0, 6)):
        kind = rng.random()
        if kind < 0.15:
            parts.append("".join(rng.choice(SPACES) for _ in range(rng.randint(1, 4))))
        elif kind < 0.3:
            parts.append(rng.choice(PIECES))
        elif kind < 0.45:
            parts.append(rng.choice(added))
        elif kind < 0.6:
            sentence = rng.choice(SENTENCES)
            begin = rng.randrange(len(sentence))
            parts.append(sentence[begin:begin + rng.randint(1, 25)])
        else:
            ranges = rng.choice(ALPHABETS)
            for _ in range(rng.randint(1, 6)):
                code = rng.randint(*rng.choice(ranges))
                if not 0xD800 <= code <= 0xDFFF:
                    parts.append(chr(code))
    return "".join(parts)


ADDED = [
    AddedToken("<|endoftext|>", special=True, normalized=False),
    AddedToken("<|user|>", special=True, normalized=False),
    AddedToken("<|user|>x", special=False, normalized=False),
    AddedToken("<mask>", special=True, lstrip=True, normalized=False),
    AddedToken("<sep>", special=True, rstrip=True, normalized=False),
    AddedToken("<both>", special=False, lstrip=True, rstrip=True, normalized=False),
    AddedToken("word", special=False, single_word=True, normalized=False),
    AddedToken("Äpfel", special=False, normalized=True),
    AddedToken("<tool é>", special=False, normalized=True),
    AddedToken("\n\n\n", special=False, normalized=False),
]
ADDED_TEXTS = [t.content for t in ADDED] + [" <mask> ", " <sep>  ", "  <both>\n", "A\u0308pfel", "<tool e\u0301>", "sword", "word.", "<|user|", "<mask> <mask>"]


def byte_level(regex, vocab, normalizer=None, ignore_merges=False, use_regex=False, prefix=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    tokenizer.pre_tokenizer = level if regex is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus(random.Random(1)), trainer)
    tokenizer.add_tokens(ADDED)
    begin = tokenizer.token_to_id("<|endoftext|>")
    template = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def with_byte_fallback():
    """Of Llama 2's kind: no pre-tokenizer, spaces as U+2581, bytes for what is unknown."""
    alphabet = sorted({c for s in SENTENCES[:4] for c in s.replace(" ", "▁")} | {"▁"})
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for character in alphabet:
        vocabulary.setdefault(character, len(vocabulary))
    merges = []
    for left, right in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("e", "r"), ("i", "n"), ("▁", "d"), ("▁d", "e"), ("▁", "▁"), ("▁▁", "▁▁"), ("▁d", "er")]:
        vocabulary.setdefault(left + right, len(vocabulary))
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def with_splits():
    """What other pre-tokenizers and normalizers do, one after the other."""
    tokenizer = byte_level(None, 300)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace(Regex(r"\d{4,}"), "#")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{Han}+|[\p{Lu}\p{Lt}]\w*"), "isolated"),
        pre_tokenizers.Split("e", "merged_with_previous"),
        pre_tokenizers.Split(Regex("[aeiou]"), "merged_with_next"),
        pre_tokenizers.Split(Regex(r"\s|x*"), "removed"),
        pre_tokenizers.Split(Regex(r"[.,;]"), "contiguous"),
        pre_tokenizers.Split(Regex(r"[^-_/]+"), "removed", invert=True),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    return tokenizer


def goldens(tokenizer, count, rng):
    rows = []
    for _ in range(count):
        text = random_text(rng, ADDED_TEXTS)
        options = rng.randrange(4)
        tokenizer.encode_special_tokens = options & 1 == 0
        ids = tokenizer.encode(text, add_special_tokens=options & 2 != 0).ids
        if rng.random() < 0.3:  # decoding takes any ids
            decoded_ids = [rng.randrange(tokenizer.get_vocab_size() + 2) for _ in range(rng.randint(0, 12))]
            text, options, ids = None, 0, decoded_ids
        rows.append([text, options, ids, tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True)])
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?", default=pathlib.Path(__file__).parents[2] / "tests/data/tokenizer", type=pathlib.Path)
    parser.add_argument("--texts", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    tokenizers = {
        "glm4": byte_level(GLM4, 700),
        "llama3": byte_level(GLM4, 600, ignore_merges=True),
        "qwen2": byte_level(QWEN2, 600, normalizer=normalizers.NFC()),
        "gpt2": byte_level(None, 600, use_regex=True, prefix=True),
        "llama2": with_byte_fallback(),
        "splits": with_splits(),
    }
    for name, tokenizer in tokenizers.items():
        document = json.loads(tokenizer.to_str())
        if name == "glm4":  # the older spelling of merges
            document["model"]["merges"] = [f"{left} {right}" for left, right in document["model"]["merges"]]
        (args.directory / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")))
        rows = goldens(tokenizer, args.texts, random.Random(f"{args.seed} {name}"))
        lines = ",\n".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in rows)
        (args.directory / f"{name}.goldens.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
