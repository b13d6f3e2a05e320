// Print what transformers.js makes of a folder, as JSON: node generate.mjs '{"folder": "", "prompts": [], "context": 1}'
import { ModelRegistry, env, pipeline } from "@huggingface/transformers";

const { folder, prompts, context } = JSON.parse(process.argv[2]);
env.allowRemoteModels = false;
const generate = await pipeline("text-generation", folder);

const texts = [];
for (const prompt of prompts) {
    const [{ generated_text }] = await generate(prompt, { max_new_tokens: context - [...prompt].length });
    texts.push(generated_text);
}

generate.tokenizer.pad_token_id = 0;
const longest = Math.max(...prompts.map((prompt) => [...prompt].length));
const records = await generate(prompts, { max_new_tokens: context - longest, return_full_text: false });
const batch = records.map(([{ generated_text }], i) => prompts[i] + generated_text);

const browser = await ModelRegistry.get_files(folder, { device: "wasm" });
console.log(JSON.stringify({ texts, batch, browser }));
