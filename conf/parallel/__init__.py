"""How the model and the packs are spread over ranks."""
