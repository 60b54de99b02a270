"""FlowSeq: translation with latent variables and normalising flows. Start with model.py."""
