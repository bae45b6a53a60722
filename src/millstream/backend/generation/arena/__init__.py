"""KV caches of any model as arenas with a position map, and states beside them: one layout for every kind of layer."""
