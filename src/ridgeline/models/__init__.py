"""Files in, arrays and text out: checkpoints, tokenizers, chat templates, downloads."""
