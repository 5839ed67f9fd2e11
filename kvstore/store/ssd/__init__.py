"""The SSD tier at work: group commits, deletes, what a crash left, and how the disk is doing."""
