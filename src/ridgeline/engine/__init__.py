"""An engine: ``LLM``, from options to a running one, its files of blocks, and quantising."""
