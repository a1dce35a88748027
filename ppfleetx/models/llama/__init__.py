"""Llama 3 (Grattafiori et al. 2024): RMSNorm, rotary positions, grouped-query attention, SwiGLU."""
