"""What GGUF files call tensors and facts, whatever the model, and what of them means nothing."""

from __future__ import annotations

from ridgeline.model.files.families.fields import count, has, integer, number, quotient, slopes

PREFIX = "blk.{}."
OUTER = {
    "embed": "token_embd.",
    "embed_norm embedding_norm layers.0.attn_norm": "token_embd_norm.",
    "head": "output.",
    "inputs": "per_layer_token_embd.",
    "inputs_norm": "per_layer_proj_norm.",
    "inputs_proj": "per_layer_model_proj.",
    "norm": "output_norm.",
    "positions": "position_embd.",
    "types": "token_types.",
}
LAYER = {
    "attn_norm": "attn_norm.",
    "q q_gate": "attn_q.",
    "k": "attn_k.",
    "v": "attn_v.",
    "o": "attn_output.",
    "q_norm": "attn_q_norm.",
    "k_norm": "attn_k_norm.",
    "sinks": "attn_sinks.weight",
    "q_a": "attn_q_a.",
    "q_a_norm": "attn_q_a_norm.",
    "q_b": "attn_q_b.",
    "kv_a": "attn_kv_a_mqa.",
    "kv_a_norm": "attn_kv_a_norm.",
    "k_b v_b": "attn_kv_b.",
    "attn_post_norm": "post_attention_norm.",
    "mlp_norm": "ffn_norm.",
    "gate": "ffn_gate.",
    "up": "ffn_up.",
    "down": "ffn_down.",
    "mlp_post_norm": "post_ffw_norm.",
    "router": "ffn_gate_inp.",
    "choice_bias": "exp_probs_b.bias",
    "shared_gate": "ffn_gate_shexp.",
    "shared_up": "ffn_up_shexp.",
    "shared_down": "ffn_down_shexp.",
    "shared_scale": "ffn_gate_inp_shexp.",
    "in": "ssm_in.",
    "conv": "ssm_conv1d.",
    "dt_bias": "ssm_dt.bias",
    "a_log": "ssm_a",
    "skip": "ssm_d",
    "gated_scale": "ssm_norm.",
    "out": "ssm_out.",
    "qkv": "attn_qkv.",
    "z": "attn_gate.",
    "beta": "ssm_beta.",
    "decay": "ssm_alpha.",
    "input_gate": "inp_gate.",
    "input_proj": "proj.",
    "input_post_norm": "post_norm.",
    "out_scale": "layer_output_scale.weight",
}
QKV = {"q k v": "attn_qkv."}
EXPERTS = {"gate": "ffn_gate_exps.", "up": "ffn_up_exps.", "down": "ffn_down_exps."}
DENSE = {name: LAYER[name] for name in EXPERTS}
BIASES = {
    "mixer.qkv_bias": has("attn_q.bias"),
    "mixer.o_bias": has("attn_output.bias"),
}
FACTS = {
    "hidden_size": integer("embedding_length"),
    "norm_eps": number("attention.layer_norm_rms_epsilon"),
    "mixer.num_heads": integer("attention.head_count"),
    "mixer.slopes": slopes("attention.head_count", largest="attention.max_alibi_bias"),
    "latent.q_rank": count("attention.q_lora_rank"),
    "latent.kv_rank": integer("attention.kv_lora_rank"),
    "latent.v_dim": integer("attention.value_length_mla", "attention.value_length"),
    "recurrent.num_heads": integer("ssm.time_step_rank"),
    "recurrent.head_dim": quotient("ssm.inner_size", "ssm.time_step_rank"),
    "recurrent.state_dim": integer("ssm.state_size"),
    "recurrent.num_groups": integer("ssm.group_count"),
    "recurrent.num_key_heads": integer("ssm.group_count"),
    "recurrent.num_value_heads": integer("ssm.time_step_rank"),
    "recurrent.key_dim": integer("ssm.state_size"),
    "recurrent.value_dim": quotient("ssm.inner_size", "ssm.time_step_rank"),
    "recurrent.kernel": integer("ssm.conv_kernel"),
    "recurrent.conv_bias": has("ssm_conv1d.bias"),
    "ffn.size": integer("feed_forward_length"),
    "ffn.num": integer("expert_count"),
    "ffn.per_token": integer("expert_used_count"),
    "ffn.scale": number("expert_weights_scale", default=1.0),
    "ffn.num_groups": integer("expert_group_count", default=1),
    "ffn.groups_met": integer("expert_group_used_count", default=1),
    "ffn.choice_bias": has("exp_probs_b.bias"),
    "shared.size": integer("expert_shared_feed_forward_length"),
    "dense.size": integer("feed_forward_length"),
    "beside.size": integer("feed_forward_length"),
    "layer.input_size": count("embedding_length_per_layer_input"),
}
FACTS_OF_EXPERTS = {"ffn.size": integer("expert_feed_forward_length", "feed_forward_length")}
FACTS_OF_LAYER_NORM = {"norm_eps": number("attention.layer_norm_epsilon")}
ROUTERS = {1: "softmax", 2: "sigmoid"}  # the numbers of "expert_gating_func"
# What changes an answer, of families that read it; others refuse it.
OF_SOME = (
    "attn_logit_softcapping", "final_logit_softcapping", "attention.scale",
    "attention.sliding_window_pattern", "embedding_scale", "residual_scale", "logit_scale",
    "rope.scaling.yarn_log_multiplier", "expert_count",
)  # fmt: skip
HARMLESS = frozenset((
    "attention.key_length_swa", "attention.value_length_swa",
    "expert_used_count", "feed_forward_length", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_truncate",
    "vocab_size",
))  # fmt: skip
