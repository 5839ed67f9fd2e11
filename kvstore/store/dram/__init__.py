"""The DRAM tier at work: room, who leaves it, what is read in it and into it."""
