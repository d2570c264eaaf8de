"""Models of random weights whose KV caches have the shapes to be measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 16  # tokens
VOCABULARY = 32000

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}


@dataclass(frozen=True)
class Model:
    """kind: llama; mla (DeepSeek's attention, a latent of 576 numbers a token); groups (Gemma 3: a layer of full
    attention after each layer with a window, so two KV-cache groups)."""

    kind: str = "llama"
    layers: int = 32
    kv_heads: int = 8
    hidden: int = 4096
    window: int = 1024  # tokens; of groups

    @property
    def head(self) -> int:
        """Numbers in a head."""
        return 128 if self.hidden >= 2048 else 64

    def page(self) -> int:
        """Bytes that a block has in a layer."""
        row = 576 if self.kind == "mla" else 2 * self.kv_heads * self.head
        return BLOCK * row * 2

    def block(self) -> int:
        """Bytes of a block in all layers of a cache tensor's group."""
        return self.page() * self.layers

    def config(self) -> dict[str, Any]:
        """What config.json holds."""
        heads = self.hidden // self.head
        made = {
            **_COMMON,
            "hidden_size": self.hidden,
            "intermediate_size": 7 * self.hidden // 2,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
        }
        if self.kind == "llama":
            made.update(architectures=["LlamaForCausalLM"], model_type="llama", head_dim=self.head, mlp_bias=False)
            made.update(num_key_value_heads=self.kv_heads, rope_theta=500000.0)
        elif self.kind == "mla":
            made.update(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", num_key_value_heads=heads)
            made.update(kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
            made.update(first_k_dense_replace=self.layers, n_routed_experts=8, num_experts_per_tok=2)  # all are dense
            made.update(n_shared_experts=1, moe_intermediate_size=self.hidden, rope_theta=10000.0)
        elif self.kind == "groups":
            made.update(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", head_dim=self.head)
            made.update(num_key_value_heads=self.kv_heads, sliding_window=self.window, query_pre_attn_scalar=self.head)
            made.update(hidden_activation="gelu_pytorch_tanh", rope_theta=500000.0, rope_local_base_freq=10000.0)
            made["layer_types"] = ["sliding_attention", "full_attention"] * (self.layers // 2)
        else:
            raise ValueError(f"model {self.kind!r}: it is llama, mla or groups")
        return made

    def write(self, folder: Path) -> Path:
        """A folder that vLLM takes for a model."""
        made = folder / f"model-{self.kind}-{self.layers}-{self.kv_heads}-{self.hidden}"
        made.mkdir(parents=True, exist_ok=True)
        (made / "config.json").write_text(json.dumps(self.config()))
        return made
