"""A copy kernel in Triton: 8-byte words, and a fixed grid that strides over all blocks."""

# mypy: ignore-errors
# No future import: Triton looks at the annotations.
import triton
import triton.language as tl


@triton.jit
def copy_words(srcs, dsts, nblocks, nwords, CHUNK: tl.constexpr):
    """Blocks of nwords words, from the addresses in srcs to those in dsts, a chunk of one block at a time."""
    chunks = tl.cdiv(nwords, CHUNK)
    for item in range(tl.program_id(0), nblocks * chunks, tl.num_programs(0)):
        block = item // chunks
        at = (item % chunks) * CHUNK + tl.arange(0, CHUNK)
        inside = at < nwords
        src = tl.load(srcs + block).to(tl.pointer_type(tl.int64))
        dst = tl.load(dsts + block).to(tl.pointer_type(tl.int64))
        tl.store(dst + at, tl.load(src + at, mask=inside), mask=inside)
