"""What a program that plays needs: `PolicyClient`. Loads NumPy, msgspec and websockets, nothing else."""

from tetherl.client.policy_client import PolicyClient

__all__ = ["PolicyClient"]
