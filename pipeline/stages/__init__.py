"""The story of a handoff: prefill, decode, drain. Stages know engines and broker; neither knows the other."""
