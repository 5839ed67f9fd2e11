"""The policy lab: replays request traces against the real tree and the real policies, with tiers that hold no bytes."""
