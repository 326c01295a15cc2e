"""How well-known families of models write a conversation down, each as a template of a few lines.

Only what decides about the loss mask is here: how turns begin and end, what becomes of a system prompt, and which
words a family changes. Tools, dates and defaults that lie inside the system prompt are left out.
"""

from dataclasses import dataclass

ALTERNATE = (
    "{%- for m in turns -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif -%}{%- endfor -%}"
)
SYSTEM_APART = (
    "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}"
    "{%- set turns = messages[1:] if system else messages -%}"
)


def framed(
    before: str, after: str, *, begin: str = "", content: str = "m['content']", answer: str = "assistant"
) -> str:
    """Every turn between the same two strings; ROLE stands for the role."""
    opened, prompted = (f"'{before}'".replace("ROLE", f"' + {role} + '") for role in ("role", f"'{answer}'"))
    return (
        f"{begin}{{%- for m in messages -%}}"
        f"{{%- set role = '{answer}' if m['role'] == 'assistant' else m['role'] -%}}"
        f"{{{{ {opened} + {content} + '{after}' }}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{ {prompted} }}}}{{%- endif -%}}"
    )


@dataclass(frozen=True)
class Family:
    """Its special tokens begin with those that begin and end a text."""

    template: str
    tokens: tuple[str, ...]
    end: str  # of the assistant's turn
    inner_end: str | None = None  # the same where another turn follows, if it differs
    system: bool = True  # False where a system prompt is refused or left out

    @property
    def bos(self) -> str:
        return self.tokens[0]

    @property
    def eos(self) -> str:
        return self.tokens[1]


CHATML = framed("<|im_start|>ROLE\\n", "<|im_end|>\\n")

FAMILIES: dict[str, Family] = {
    "Yi (ChatML)": Family(CHATML, ("<|startoftext|>", "<|im_end|>", "<|im_start|>"), "<|im_end|>"),
    "InternLM2": Family("{{ bos_token }}" + CHATML, ("<s>", "</s>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "Qwen2.5": Family(
        "{%- if messages[0]['role'] != 'system' -%}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif -%}" + CHATML,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        "<|im_end|>",
    ),
    "Qwen3": Family(
        framed(
            "<|im_start|>ROLE\\n",
            "<|im_end|>\\n",
            content="('<think>\\n\\n</think>\\n\\n' if loop.last and role == 'assistant' else '')"
            " + m['content'].split('</think>')[-1].lstrip('\\n')",
        ),
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"),
        "<|im_end|>",
    ),
    "Llama 3": Family(
        framed(
            "<|start_header_id|>ROLE<|end_header_id|>\\n\\n",
            "<|eot_id|>",
            begin="{{ bos_token }}",
            content="m['content'] | trim",
        ),
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        "<|eot_id|>",
    ),
    "Llama 2": Family(
        SYSTEM_APART + ALTERNATE + "{%- for m in turns -%}{%- if m['role'] == 'user' -%}"
        "{{ bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if system and loop.first else '')"
        " + m['content'] | trim + ' [/INST]' }}"
        "{%- else -%}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{%- endif -%}{%- endfor -%}",
        ("<s>", "</s>"),
        " </s>",
    ),
    "Mistral v0.1": Family(
        "{%- set turns = messages -%}" + ALTERNATE + "{{ bos_token }}{%- for m in turns -%}"
        "{%- if m['role'] == 'user' -%}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{%- else -%}{{ m['content'] + eos_token }}{%- endif -%}{%- endfor -%}",
        ("<s>", "</s>"),
        "</s>",
        system=False,
    ),
    "Mistral v0.3": Family(
        SYSTEM_APART + ALTERNATE + "{{ bos_token }}{%- for m in turns -%}{%- if m['role'] == 'user' -%}"
        "{{ '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + m['content'] + '[/INST]' }}"
        "{%- else -%}{{ ' ' + m['content'] | trim + eos_token }}{%- endif -%}{%- endfor -%}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
        system=False,
    ),
    "Gemma 2": Family(
        "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"
        + framed(
            "<start_of_turn>ROLE\\n",
            "<end_of_turn>\\n",
            begin="{{ bos_token }}",
            content="m['content'] | trim",
            answer="model",
        ),
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        system=False,
    ),
    "Gemma 3": Family(
        SYSTEM_APART + ALTERNATE + "{{ bos_token }}{%- for m in turns -%}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\\n'"
        " + (system + '\\n\\n' if system and loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "Phi-3": Family(
        framed("<|ROLE|>\\n", "<|end|>\\n") + "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}",
        ("<s>", "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|end|>",
    ),
    "Phi-4": Family(
        framed("<|im_start|>ROLE<|im_sep|>", "<|im_end|>"),
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_sep|>"),
        "<|im_end|>",
    ),
    "DeepSeek V3": Family(
        SYSTEM_APART + "{{ bos_token + system }}{%- for m in turns -%}{%- if m['role'] == 'user' -%}"
        "{{ '<｜User｜>' + m['content'] }}{%- else -%}{{ '<｜Assistant｜>' + m['content'] + eos_token }}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
    ),
    "GLM-4": Family(  # a turn ends where the next begins, so that the last has no end of its own
        framed("<|ROLE|>\\n", "", begin="[gMASK]<sop>"),
        ("[gMASK]", "<|endoftext|>", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|endoftext|>",
        inner_end="<|user|>",
    ),
    "Command R": Family(
        framed(
            "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            begin="{{ bos_token }}",
            content="m['content'] | trim",
            answer="CHATBOT",
        ),
        ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
    ),
}
