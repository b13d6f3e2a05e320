// Uses the exported page as a reader would, in headless Chromium, and prints as JSON what was there to see.
//
//     node tests/web.mjs PLAN        PLAN, as JSON: see test_web.py
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../web/package.json", import.meta.url))("playwright-core");
const plan = JSON.parse(process.argv[2]);
const quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update";
const browser = await chromium.launch({
  executablePath: plan.chromium,
  args: ["--headless", "--no-sandbox", "--disable-sync", ...quiet.split(" ")],
});
const seen = { requests: [], complaints: [] };

async function open(url, options = {}) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 900 }, ...options });
  const complaints = [];
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => complaints.push(`uncaught: ${error}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && complaints.push(line.text()));
  await page.goto(url);
  await page.waitForFunction(() => document.body.dataset.state !== "loading");
  return { page, complaints };
}

async function fill(page, { press, ...values }) {
  for (const [name, value] of Object.entries(values)) {
    const field = page.locator(`[name=${name}]`);
    await (name === "kv_cache" ? field.setChecked(value) : field.fill(String(value ?? "")));
  }
}

async function result(page) {
  await page.waitForFunction(() => document.body.dataset.state !== "running");
  return page.evaluate(() => ({
    text: document.getElementById("text").textContent,
    status: document.getElementById("status").textContent,
    message: document.getElementById("message").textContent,
    invalid: [...document.querySelectorAll("[aria-invalid]")].map((field) => field.name),
    focus: document.activeElement.name,
    points: ["off", "on"].map((setting) => document.getElementById(`curve-${setting}`).points.length),
    cache: document.getElementById("cache").textContent,
    chart: document.getElementById("chart").getAttribute("aria-label"),
  }));
}

const { page, complaints } = await open(plan.site);
seen.before = await result(page);
seen.jobs = [];
for (const job of plan.jobs) {
  await fill(page, job);
  await page.evaluate(() => {
    window.fed = []; // of every call of the model: how many characters were fed, and how many the cache held
    delete session.run;
    const run = session.run.bind(session);
    session.run = (feeds, ...rest) => {
      window.fed.push([feeds.input_ids.dims[1], feeds["past_key_values.0.key"].dims[2]]);
      return run(feeds, ...rest);
    };
  });
  await page.click(`#${job.press ?? "generate"}`);
  seen.jobs.push({ ...(await result(page)), fed: await page.evaluate(() => window.fed) });
}
await page.locator("#chart").screenshot({ path: plan.picture });

seen.mistakes = [];
for (const values of plan.mistakes) {
  await fill(page, { ...plan.jobs[0], ...values });
  await page.click("#generate");
  seen.mistakes.push(await result(page));
}

// Stop, pressed when a reader could have seen some of the text, with a model that takes its time
await fill(page, plan.jobs[0]);
await page.evaluate(() => {
  const run = session.run;
  session.run = (...args) => {
    for (const began = performance.now(); performance.now() - began < 5; );
    return run(...args);
  };
  const [button, text] = ["generate", "continuation"].map((id) => document.getElementById(id));
  text.textContent = "";
  const look = () => (text.textContent ? button.click() : setTimeout(look));
  button.click();
  look();
});
seen.stopped = await result(page);
seen.complaints.push(...complaints);
await page.close();

// the keyboard alone
{
  const { page, complaints } = await open(plan.site);
  const { keyboard } = page;
  seen.tabs = [];
  const tab = async (...keys) => {
    await keyboard.press("Tab");
    seen.tabs.push(
      await page.evaluate(() => {
        const { name, id, labels, textContent } = document.activeElement;
        const label = labels?.[0]?.textContent.trim() || textContent;
        return { field: name || id, label, ring: getComputedStyle(document.activeElement).outlineStyle };
      }),
    );
    for (const key of keys) await (key.length > 1 ? keyboard.press(key) : keyboard.type(key));
  };
  await tab("Control+a", ...plan.keys.prompt);
  await tab();
  await tab();
  await tab("Control+a", ...plan.keys.seed);
  await tab(...plan.keys.max_new_tokens);
  await tab("Space"); // the cache, off
  await tab();
  await tab("Enter");
  seen.keyboard = [await result(page)];
  for (let i = 0; i < 4; i++) await keyboard.press("Shift+Tab");
  await keyboard.press("Enter"); // in the seed
  seen.keyboard.push(await result(page));
  for (let i = 0; i < 3; i++) await keyboard.press("Shift+Tab");
  await keyboard.press("Control+Enter"); // in the prompt
  seen.keyboard.push(await result(page));
  seen.complaints.push(...complaints);
  await page.close();
}

// how it looks: as narrow as phones are, and in the dark
seen.looks = {};
for (const colorScheme of ["light", "dark"]) {
  const { page, complaints } = await open(plan.site, { colorScheme, viewport: { width: 360, height: 740 } });
  await fill(page, { prompt: "# ".repeat(99) }); // a message, and a long one
  await page.click("#generate");
  const { message } = await result(page);
  await fill(page, { prompt: "" });
  await page.click("#compare");
  await result(page);
  seen.looks[colorScheme] = await page.evaluate((message) => {
    document.getElementById("message").textContent = message;
    const style = (selector) => getComputedStyle(document.querySelector(selector));
    const background = style("body").backgroundColor;
    const readable = ["body", "#model", "#status", "label", "b.on", "b.off", "thead th"];
    return {
      width: document.documentElement.scrollWidth,
      background,
      inks: Object.fromEntries(readable.map((selector) => [selector, style(selector).color])),
      lines: Object.fromEntries(["off", "on"].map((setting) => [setting, style(`#curve-${setting}`).stroke])),
    };
  }, message);
  seen.complaints.push(...complaints);
  await page.close();
}

// folders that something is wrong with
seen.broken = {};
for (const [name, url] of Object.entries(plan.broken)) {
  const { page, complaints } = await open(url);
  const disabled = await page.locator("button:disabled").count();
  seen.broken[name] = { ...(await result(page)), complaints, disabled };
  await page.close();
}

await browser.close();
console.log(JSON.stringify(seen));
