"""The cache transfer manager: a process for each rank, beside the engine, that swaps its cache blocks.

    kvswap manager run --rank 0 --mp_num 1 --device_id 0 ... --create_cache_tensor

kvswap.fastdeploy.client has the engine's side. Both need pyzmq and msgspec: pip install 'kvswap[manager]'.
docs/fastdeploy.md has all of it.
"""
