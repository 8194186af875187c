"""The models that are known by name, and where the parts of any model lie."""
