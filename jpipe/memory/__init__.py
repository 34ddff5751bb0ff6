"""The use of memory over the time of a step, and the demands of a smaller memory.

- `Pipeline.memory_by_device`: what the stages of each device need, a `DeviceMemory` each.
- `Pipeline.memory_timeline` and `memory_timeline(f, *args)`: every block of a step, as a `Timeline`.
- `replay`: the bytes that a memory of a given capacity moves, under Belady's rule, LRU or FIFO, or at least.
- `pack_chunks`, `best_chunk_size`: tensors in chunks of one size, as PatrickStar lays them out.
"""

from jpipe.memory._block import USES, Access, Block, Interval, blocks_of_csv
from jpipe.memory._chunks import ChunkLayout, best_chunk_size, pack_chunks
from jpipe.memory._compiled import memory_timeline
from jpipe.memory._devices import DeviceMemory
from jpipe.memory._replacement import POLICIES, Moves, accesses_of, replay
from jpipe.memory._timeline import Timeline

__all__ = [
    "POLICIES",
    "USES",
    "Access",
    "Block",
    "ChunkLayout",
    "DeviceMemory",
    "Interval",
    "Moves",
    "Timeline",
    "accesses_of",
    "best_chunk_size",
    "blocks_of_csv",
    "memory_timeline",
    "pack_chunks",
    "replay",
]
