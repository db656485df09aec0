// The Node SDK: `node use_openai.mjs URL MODEL SDK_DIRECTORY`.
import { createRequire } from "node:module";
import { join } from "node:path";
const [url, model, sdk] = process.argv.slice(2);
const OpenAI = createRequire(join(sdk, "package.json"))("openai").default;
const client = new OpenAI({
  baseURL: url,
  apiKey: "none",
  maxRetries: 0,
  defaultHeaders: { "X-Crossfill-Route": "vllm->mlx" },
});
const question = "What is the capital of France?";
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] }, large: { type: "boolean" } },
  required: ["city", "large"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "look_up", parameters } }];
const asked = { model, messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 40 };

const whole = await client.chat.completions.create(asked);
let streamed = "", streamedUsage = 0;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  streamedUsage += chunk.usage?.total_tokens ?? 0;
}
const called = await client.chat.completions.create({ ...asked, tools, tool_choice: "required" });
const runner = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
const final = (await runner.finalChatCompletion()).choices[0].message;
const form = await client.chat.completions.create({
  ...asked,
  response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parameters } },
});
const response = await client.responses.create({ model, input: question, temperature: 0, max_output_tokens: 40 });
let responseStreamed = "";
for await (const event of await client.responses.create({ model, input: question, temperature: 0, max_output_tokens: 40, stream: true })) {
  if (event.type === "response.output_text.delta") responseStreamed += event.delta;
}
let refusal = "none";
try {
  await client.chat.completions.create({ ...asked, temperature: 9 });
} catch (error) {
  refusal = `${error.status} ${error.param}`;
}
const call = (message) => [message.tool_calls[0].function.name, JSON.parse(message.tool_calls[0].function.arguments)];
console.log(JSON.stringify({
  text: whole.choices[0].message.content,
  streamed,
  usage: whole.usage.total_tokens,
  streamed_usage: streamedUsage,
  model: whole.model,
  call: call(called.choices[0].message),
  streamed_call: call(final),
  form: JSON.parse(form.choices[0].message.content),
  response: response.output_text,
  response_streamed: responseStreamed,
  refusal,
}));
