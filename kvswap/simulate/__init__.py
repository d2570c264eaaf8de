"""Many nodes without their hardware: `kvswap simulate`. docs/scale.md says what is modelled and what is not.

settings.py has the nodes, traffic.py the requests of many copies of a trace, links.py links that are busy for a while,
pools.py the tier that all nodes share, and run.py the clock. The tiers of a node, and what leaves them, are those of
the replay (kvswap.replay.tiers); which node holds a block is decided by the code of the remote tier (kvswap.remote).
"""
