"""From the formats of a data directory that older versions wrote to that of today."""
