"""Images to patches and spans of tokens: sizing, pixels, delimiters."""
