"""Views of a run elsewhere: Weights & Biases and TensorBoard, which training never waits for."""
