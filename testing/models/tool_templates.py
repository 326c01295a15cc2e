"""Short chat templates with tools and reasoning, with the structure of those of well-known model families."""

# Like Qwen3: reasoning only after the last user turn, empty reasoning in the last turn, results of tools in user turns.
QWEN_3 = r"""
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
{{ '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') + '# Tools' }}
{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}
{{ ('<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '') + '\n<tool_response>\n' + m.content }}
{{- '\n</tool_response>' + ('' if not loop.last and messages[loop.index0 + 1].role == 'tool' else '<|im_end|>\n') }}
{%- elif m.role == 'assistant' -%}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- set content = m.content if m.content is string else '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last_user and (loop.last or reasoning) -%}
{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
{%- endif -%}
{{ content }}
{%- for call in m.tool_calls or [] -%}
{{ ('\n' if content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{{- ('<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif -%}
"""

# Like Llama 3.1: one call per turn, no content beside it, results of tools as JSON text, any role name.
LLAMA_3_1 = r"""
{%- for m in messages -%}
{%- if 'tool_calls' in m -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('only single tool calls are supported') }}{%- endif -%}
{{ '<|im_start|>assistant\n\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '}<|im_end|>' }}
{%- elif m.role == 'tool' -%}{{ '<|im_start|>ipython\n\n' + (m.content | tojson) + '<|im_end|>' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n\n' }}
{%- if tools and m.role == 'user' and loop.index0 <= 1 -%}
{%- for tool in tools -%}{{ (tool | tojson(indent=4)) + '\n\n' }}{%- endfor -%}
{%- endif -%}
{{ (m.content | trim) + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n\n' }}{%- endif -%}
"""

# Like gpt-oss: channels; only the first call of a turn; analysis of calls only before the final message is written.
GPT_OSS = r"""
{%- set ns = namespace(call='') -%}
{{ '<|start|>system<|message|>Reasoning: ' }}
{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '<|end|>' }}
{%- set instructions = messages[0].content if messages[0].role in ('system', 'developer') else '' -%}
{%- if instructions or tools -%}
{{ '<|start|>developer<|message|>' + instructions }}
{%- for tool in tools or [] -%}{{ '\ntype ' + tool.function.name + ' = (_: any) => any;' }}{%- endfor -%}{{ '<|end|>' }}
{%- endif -%}
{%- for m in (messages[1:] if instructions else messages) -%}
{%- if m.role == 'user' -%}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' -%}
{{ '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) + '<|end|>' }}
{%- elif 'tool_calls' in m -%}
{%- set call = m.tool_calls[0].function -%}{%- set ns.call = call.name -%}
{%- set later = namespace(final=false) -%}
{%- for n in (messages[1:] if instructions else messages)[loop.index:] -%}
{%- if n.role == 'assistant' and 'tool_calls' not in n -%}{%- set later.final = true -%}{%- endif -%}
{%- endfor -%}
{%- if (m.thinking or m.content) and not later.final -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' -%}
{%- if 'thinking' in m and loop.last and not add_generation_prompt -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""

# Like DeepSeek V3: arguments as JSON text, no tools, no reasoning.
DEEPSEEK_V3 = r"""
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|user|>' + m.content }}
{%- elif m.role == 'tool' -%}{{ '<|tool|>' + m.content }}
{%- elif m.role == 'assistant' -%}
{{ '<|assistant|>' + m.content.split('</think>')[-1] }}
{%- for call in m.tool_calls or [] -%}
{{ '<|call|>' + call.function.name + '\n' + call.function.arguments + '<|end|>' }}
{%- endfor -%}
{{ '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|><think>\n' }}{%- endif -%}
"""

# Like Qwen3.5: `<think>` in the generation prompt, and reasoning in every turn after the last user turn.
QWEN_3_5 = QWEN_3.replace("(loop.last or reasoning)", "true").replace(
    "not enable_thinking else '')", "not enable_thinking else '<think>\\n')"
)

TOOL_TEMPLATES = {
    "Qwen3": QWEN_3,
    "Qwen3.5": QWEN_3_5,
    "Llama 3.1": LLAMA_3_1,
    "gpt-oss": GPT_OSS,
    "DeepSeek V3": DEEPSEEK_V3,
}
SPECIAL_TOKENS = (
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
