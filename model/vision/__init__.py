"""The image tower, the aligner to the language model's width, and the filling of spans."""
