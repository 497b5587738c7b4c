"""A whole run: choices in the other groups, and the settings that go with them."""
