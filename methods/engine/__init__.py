"""Forward pass over Hugging Face weights, independent of the methods: any layers, any token tree, ragged rows.

``causal_lm`` has decoder-only models, ``seq2seq_lm`` encoder-decoders. The C++ kernels are in the folder ``cpp``.
"""
