"""How operators are applied: `native` is the C library, `cpu` the functions over arrays that use it."""
