"""The model's files: configuration, tokenizer, processor. A GLM-ASR checkpoint in transformers' layout, in miniature."""

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GlmAsrConfig, GlmAsrForConditionalGeneration, GlmAsrProcessor, PreTrainedTokenizerFast, WhisperFeatureExtractor

from clips import WORDS

VOCABULARY = 384
PROMPT = "Please transcribe this audio into text"
SPECIAL_TOKENS = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|pad|>",
]  # fmt: skip
END_TOKENS = ["<|endoftext|>", "<|user|>", "<|observation|>"]

# How GLM-4's tokenizer cuts text before the merges: contractions, words with one leading space or sign, up to three digits, signs, line ends.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}{%- if message['role'] == 'user' -%}<|user|>
{% for part in message['content'] -%}{%- if part['type'] == 'audio' -%}<|begin_of_audio|><|pad|><|end_of_audio|>{%- elif part['type'] == 'text' -%}<|user|>
{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}"""


def make_tokenizer():
    """Byte-level BPE over all 256 bytes; the digits' words and the prompt's are one token each, with and without the space before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(10 * WORDS + 20 * [" " + word for word in WORDS] + 5 * [PROMPT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    for word in WORDS:
        assert len(tokenizer.encode(word).ids) == len(tokenizer.encode(" " + word).ids) == 1, word
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", padding_side="left")


def make_processor():
    return GlmAsrProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=128), tokenizer=make_tokenizer(), chat_template=CHAT_TEMPLATE,
        default_transcription_prompt=PROMPT,
    )  # fmt: skip


def make_model(tokenizer):
    """Random weights. The encoder is 7 GFLOP for a window of 30 s: most of it attention over 1500 positions, so few layers."""
    ends = tokenizer.convert_tokens_to_ids(END_TOKENS)
    config = GlmAsrConfig(
        audio_config={
            "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 3, "num_mel_bins": 128,
            "max_position_embeddings": 1500, "partial_rotary_factor": 0.5,
        },
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": False, "eos_token_id": ends,
            "bos_token_id": None, "pad_token_id": ends[0],
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|pad|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GlmAsrForConditionalGeneration(config)
    model.generation_config.update(eos_token_id=ends, pad_token_id=ends[0], bos_token_id=None, do_sample=False, max_new_tokens=128)
    model.generation_config.segment_seconds = 12  # for Tilewave: strings of up to 12 digits are trained on, about one a second
    return model


def save(model, processor, folder):
    """Writes the checkpoint, weights as bfloat16."""
    copy = GlmAsrForConditionalGeneration(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.save_pretrained(folder)
    processor.save_pretrained(folder)
