"""``python -m bench rivals``: the figures that vLLM and SGLang wrote of themselves, beside the project's records."""
