"""Forward pass over Hugging Face weights: any layers, any token tree, ragged rows. Knows no method."""
