"""The policy server: sessions of external clients, batched inference, the front door."""
