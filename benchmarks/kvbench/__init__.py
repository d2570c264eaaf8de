"""What measures kvswap beside `kvswap bench`: path auto against the others, and vLLM's job queue."""
