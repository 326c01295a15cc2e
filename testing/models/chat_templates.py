"""Short versions of the chat templates of well-known model families.

They contain only the code that affects the loss mask: the start and end of turns, the system prompt, and changes to the
text. Tools, dates and default system prompts are omitted.
"""

from dataclasses import dataclass

ALTERNATE = (
    "{%- for m in turns -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif -%}{%- endfor -%}"
)
SPLIT_SYSTEM = (
    "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}"
    "{%- set turns = messages[1:] if system else messages -%}"
)


def render_template(
    turn_prefix: str,
    turn_suffix: str,
    *,
    conversation_prefix: str = "",
    content_expression: str = "m['content']",
    assistant_role: str = "assistant",
) -> str:
    """Render a template that puts every turn between a prefix, in which ROLE is replaced by the role, and a suffix."""
    turn_start, prompt = (
        f"'{turn_prefix}'".replace("ROLE", f"' + {role} + '") for role in ("role", f"'{assistant_role}'")
    )
    return (
        f"{conversation_prefix}{{%- for m in messages -%}}"
        f"{{%- set role = '{assistant_role}' if m['role'] == 'assistant' else m['role'] -%}}"
        f"{{{{ {turn_start} + {content_expression} + '{turn_suffix}' }}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{ {prompt} }}}}{{%- endif -%}}"
    )


@dataclass(frozen=True)
class TemplateFamily:
    """A chat template with its special tokens, of which the first two are BOS and EOS."""

    template: str
    tokens: tuple[str, ...]
    turn_end: str  # end of an assistant turn
    inner_turn_end: str | None = None  # end of an assistant turn before another turn, if it differs
    supports_system_prompt: bool = True  # False if a system prompt is rejected or omitted

    @property
    def bos(self) -> str:
        return self.tokens[0]

    @property
    def eos(self) -> str:
        return self.tokens[1]


CHATML = render_template("<|im_start|>ROLE\\n", "<|im_end|>\\n")

FAMILIES: dict[str, TemplateFamily] = {
    "Yi (ChatML)": TemplateFamily(CHATML, ("<|startoftext|>", "<|im_end|>", "<|im_start|>"), "<|im_end|>"),
    "InternLM2": TemplateFamily(
        "{{ bos_token }}" + CHATML, ("<s>", "</s>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"
    ),
    "Qwen2.5": TemplateFamily(
        "{%- if messages[0]['role'] != 'system' -%}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif -%}" + CHATML,
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        "<|im_end|>",
    ),
    "Qwen3": TemplateFamily(
        render_template(
            "<|im_start|>ROLE\\n",
            "<|im_end|>\\n",
            content_expression="('<think>\\n\\n</think>\\n\\n' if loop.last and role == 'assistant' else '')"
            " + m['content'].split('</think>')[-1].lstrip('\\n')",
        ),
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"),
        "<|im_end|>",
    ),
    "Llama 3": TemplateFamily(
        render_template(
            "<|start_header_id|>ROLE<|end_header_id|>\\n\\n",
            "<|eot_id|>",
            conversation_prefix="{{ bos_token }}",
            content_expression="m['content'] | trim",
        ),
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        "<|eot_id|>",
    ),
    "Llama 2": TemplateFamily(
        SPLIT_SYSTEM + ALTERNATE + "{%- for m in turns -%}{%- if m['role'] == 'user' -%}"
        "{{ bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if system and loop.first else '')"
        " + m['content'] | trim + ' [/INST]' }}"
        "{%- else -%}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{%- endif -%}{%- endfor -%}",
        ("<s>", "</s>"),
        " </s>",
    ),
    "Mistral v0.1": TemplateFamily(
        "{%- set turns = messages -%}" + ALTERNATE + "{{ bos_token }}{%- for m in turns -%}"
        "{%- if m['role'] == 'user' -%}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{%- else -%}{{ m['content'] + eos_token }}{%- endif -%}{%- endfor -%}",
        ("<s>", "</s>"),
        "</s>",
        supports_system_prompt=False,
    ),
    "Mistral v0.3": TemplateFamily(
        SPLIT_SYSTEM + ALTERNATE + "{{ bos_token }}{%- for m in turns -%}{%- if m['role'] == 'user' -%}"
        "{{ '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + m['content'] + '[/INST]' }}"
        "{%- else -%}{{ ' ' + m['content'] | trim + eos_token }}{%- endif -%}{%- endfor -%}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "</s>",
        supports_system_prompt=False,
    ),
    "Gemma 2": TemplateFamily(
        "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"
        + render_template(
            "<start_of_turn>ROLE\\n",
            "<end_of_turn>\\n",
            conversation_prefix="{{ bos_token }}",
            content_expression="m['content'] | trim",
            assistant_role="model",
        ),
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        supports_system_prompt=False,
    ),
    "Gemma 3": TemplateFamily(
        SPLIT_SYSTEM + ALTERNATE + "{{ bos_token }}{%- for m in turns -%}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\\n'"
        " + (system + '\\n\\n' if system and loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "Phi-3": TemplateFamily(
        render_template("<|ROLE|>\\n", "<|end|>\\n")
        + "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}",
        ("<s>", "<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|end|>",
    ),
    "Phi-4": TemplateFamily(
        render_template("<|im_start|>ROLE<|im_sep|>", "<|im_end|>"),
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_sep|>"),
        "<|im_end|>",
    ),
    "DeepSeek V3": TemplateFamily(
        SPLIT_SYSTEM + "{{ bos_token + system }}{%- for m in turns -%}{%- if m['role'] == 'user' -%}"
        "{{ '<｜User｜>' + m['content'] }}{%- else -%}{{ '<｜Assistant｜>' + m['content'] + eos_token }}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
    ),
    "GLM-4": TemplateFamily(  # turns have no end token; each turn ends at the start token of the next turn
        render_template("<|ROLE|>\\n", "", conversation_prefix="[gMASK]<sop>"),
        ("[gMASK]", "<|endoftext|>", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|endoftext|>",
        inner_turn_end="<|user|>",
    ),
    "Command R": TemplateFamily(
        render_template(
            "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            conversation_prefix="{{ bos_token }}",
            content_expression="m['content'] | trim",
            assistant_role="CHATBOT",
        ),
        ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
    ),
}
