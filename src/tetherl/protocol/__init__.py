"""The tetherl protocol: messages, their bytes, and both halves of a session as state machines without I/O."""
