"""What is trained: the sizes of the model, under the names of the released config.json."""
