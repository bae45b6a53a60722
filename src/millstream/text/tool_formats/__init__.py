"""How models write calls of functions: one small file a format, and a registry that chooses among them."""
