"""The cache transfer manager: for each rank a process beside the engine that swaps the engine's cache blocks.

    kvswap manager run --rank 0 --mp_num 1 --device_id 0 ... --create_cache_tensor

It takes the place of FastDeploy's fastdeploy/cache_manager/cache_transfer_manager.py (releases 2.0 to 2.6).
kvswap.fastdeploy.client is the engine's client. Both need pyzmq and msgspec: pip install 'kvswap[manager]'.
See docs/fastdeploy.md.
"""
