"""Checkpoints of one attention layer of DeepSeek-V3.2: a folder with config.json and model.safetensors, with the published names."""

import dataclasses
import json
import math
import pathlib

import torch

PREFIX = "model.layers.0.self_attn."
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}  # by their names in safetensors


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071), by the names of config.json. The defaults are DeepSeek-V3.2's."""

    factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale_all_dim: float = 1.0


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a layer, by the names of config.json. A comment gives DeepSeek-V3.2's where the default is smaller."""

    hidden_size: int = 256  # 7168
    num_attention_heads: int = 8  # 128
    q_lora_rank: int = 192  # 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 16  # 64
    index_head_dim: int = 128
    index_topk: int = 16  # 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()

    @classmethod
    def from_json(cls, values):
        """Of config.json's values, those that the layer needs."""

        def chosen(of, values):
            return {field.name: values[field.name] for field in dataclasses.fields(of) if field.name in values}

        scaling = RopeScaling(**chosen(RopeScaling, values["rope_scaling"]))
        return cls(**{**chosen(cls, values), "rope_scaling": scaling})


def shapes(config):
    """The shape of each weight, by its name without PREFIX. A product's weight is [out, in]."""
    hidden, heads, index_heads = config.hidden_size, config.num_attention_heads, config.index_n_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        "q_a_proj.weight": (config.q_lora_rank, hidden),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (heads * (nope + rope), config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.kv_lora_rank + rope, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (nope + value), config.kv_lora_rank),
        "o_proj.weight": (hidden, heads * value),
        "indexer.wq_b.weight": (index_heads * config.index_head_dim, config.q_lora_rank),
        "indexer.wk.weight": (config.index_head_dim, hidden),
        "indexer.k_norm.weight": (config.index_head_dim,),
        "indexer.k_norm.bias": (config.index_head_dim,),
        "indexer.weights_proj.weight": (index_heads, hidden),
    }


def dtype_of(name):
    return "F32" if "k_norm" in name else "BF16"


def random_weights(config, seed=0):
    """Weights of shapes() and dtype_of(), under which the elements of projections and norms are about 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1
        weight = 0.1 * noise + name.endswith("weight") if is_norm else noise / math.sqrt(shape[1])
        weights[name] = weight.to(DTYPES[dtype_of(name)])
    return weights


def write(folder, config, weights):
    """Writes the checkpoint; makes the folder if there is none."""
    header, offset = {}, 0
    for name, tensor in weights.items():
        end = offset + tensor.nbytes
        header[PREFIX + name] = {"dtype": dtype_of(name), "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in weights.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def read(folder):
    """(config, weights) of the checkpoint. ValueError names a weight that is missing, or has another shape or dtype."""
    folder = pathlib.Path(folder)
    config = Config.from_json(json.loads((folder / "config.json").read_text()))
    data = bytearray((folder / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header, weights = json.loads(data[8:begin]), {}
    for name, shape in shapes(config).items():
        if PREFIX + name not in header:
            raise ValueError(f"{folder / 'model.safetensors'} has no {PREFIX + name}")
        entry = header[PREFIX + name]
        dtype = dtype_of(name)
        if entry["dtype"] != dtype or tuple(entry["shape"]) != shape:
            given = f"{entry['dtype']} with shape {tuple(entry['shape'])}"
            raise ValueError(f"{PREFIX + name} is {given}; the layer needs {dtype} with shape {shape}")
        first, last = entry["data_offsets"]
        weights[name] = torch.frombuffer(data[begin + first : begin + last], dtype=DTYPES[dtype]).view(shape)
    return config, weights
