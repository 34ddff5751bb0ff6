"""The one program that runs every table: layout of the state, transport, operations, updates, and the scan over ticks."""
