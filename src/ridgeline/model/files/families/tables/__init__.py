"""The families, a row each: see ``inherit.row``. Literal tables.

``decoders`` are those like Llama, ``gemma`` that line, ``layer_norm`` those with LayerNorm,
``experts`` and ``recurrent`` those with such layers, ``encoders`` embed, and ``plan_only`` are
counted, not run.
"""
