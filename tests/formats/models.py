"""Small models without coordinates, for what a layout makes of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np
from safetensors.numpy import save_file

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY, LAYERS = 8, 4, 4, 16, 24, 20, 3

QKV = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}


def llama(kind: str = "plain") -> dict[str, np.ndarray]:
    """A Llama of odd sizes; `fused`: with qkv_proj and gate_up_proj."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.o_proj.weight": (HIDDEN, q), f"{at}.mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{at}.input_layernorm.weight": (HIDDEN,), f"{at}.post_attention_layernorm.weight": (HIDDEN,)}
        if kind == "fused":
            shapes |= {f"{at}.self_attn.qkv_proj.weight": (q + 2 * kv, HIDDEN)}
            shapes |= {f"{at}.self_attn.qkv_proj.bias": (q + 2 * kv,)}
            shapes |= {f"{at}.mlp.gate_up_proj.weight": (2 * INNER, HIDDEN)}
        else:
            shapes |= {f"{at}.self_attn.{name}_proj.weight": (size, HIDDEN) for name, size in QKV.items()}
            shapes |= {f"{at}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    return filled(shapes)


def filled(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Arrays no two elements of which are equal, as long as there are fewer than 2**32."""
    found, first = {}, 0
    for fqn, shape in shapes.items():
        size = int(np.prod(shape))
        found[fqn] = np.arange(first, first + size, dtype=np.uint32).view(np.float32).reshape(shape)
        first += size
    return found


def write_hugging_face(folder: Path, tensors: Mapping[str, np.ndarray], **config: int) -> Path:
    folder.mkdir()
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
