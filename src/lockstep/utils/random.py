"""The import place that people know for seeds and random states. Nothing lives here."""

from lockstep.comm.rng import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
