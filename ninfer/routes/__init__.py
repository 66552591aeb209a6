"""Which kernel computes an op: routes, their tables, selection, lowering. `tables.REGISTRY` has them all."""
