"""Forward pass over Hugging Face weights, independent of the methods: any layers, any token tree, ragged rows."""
