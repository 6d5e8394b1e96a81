"""Every model family that EPS's own decoders compute, by the `model_type` of its config.json."""

from eps_core.models import gemma3, llama, mistral, phi3, qwen2, qwen3

FAMILIES = {one.FAMILY.model_type: one.FAMILY for one in (llama, mistral, qwen2, qwen3, phi3, gemma3)}

# engine -> the families beyond these whose layers its hook makes sparse, as tests have it
ENGINE_FAMILIES: dict[str, tuple[str, ...]] = {"transformers": (), "mlx-lm": ("lfm2",), "vllm": ()}


def engine_note(family: object) -> str:
    """Return which engines run a family that this project's decoders do not compute."""
    engines = [name for name, families in ENGINE_FAMILIES.items() if family in families]
    if not engines:
        return "; --engine transformers, mlx-lm and vllm read more families"
    return f"; use --engine {' or '.join([', '.join(engines[:-1]), engines[-1]] if engines[1:] else engines)}"
