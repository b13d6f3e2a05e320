// Uses the exported page in headless Chromium, as a reader would, and prints what there was to see, as JSON.
//
//     node tests/web.mjs PLAN        PLAN, as JSON: see test_web.py
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../web/package.json", import.meta.url))("playwright-core");
const plan = JSON.parse(process.argv[2]);
const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath: plan.chromium, args });
const seen = { requests: [], complaints: [] };

/** Open the page, wait until it has loaded, and return what `work` makes of it. */
async function visit(url, work, { complaints = seen.complaints, ...options } = {}) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 900 }, ...options });
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => complaints.push(`uncaught: ${error}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && complaints.push(line.text()));
  await page.goto(url);
  await page.waitForFunction(() => document.body.dataset.state !== "loading");
  const result = await work(page);
  await page.close();
  return result;
}

async function fill(page, values) {
  await page.evaluate(() => (document.getElementById("settings").open = true));
  for (const [name, value] of Object.entries(values)) await page.locator(`[name=${name}]`).fill(value);
}

/** What is there to see, once the page is idle. */
async function result(page) {
  await page.waitForFunction(() => document.body.dataset.state !== "running");
  return page.evaluate(() => {
    const text = (id) => document.getElementById(id).textContent;
    return {
      text: text("text"),
      status: text("status"),
      message: text("message"),
      rows: ["rows-off", "rows-on"].map((id) => Number(text(id).replaceAll(",", ""))),
      focus: document.activeElement.name,
      disabled: document.getElementById("run").disabled,
      address: location.search,
    };
  });
}

async function run(page, values) {
  await fill(page, values);
  await page.click("#run");
  return result(page);
}

/** The text of an element, once it has some. */
async function said(page, selector) {
  await page.waitForFunction((selector) => document.querySelector(selector)?.textContent, selector);
  return page.locator(selector).first().textContent();
}

// texts, and a mistake in the form
await visit(plan.site, async (page) => {
  seen.jobs = [];
  for (const job of plan.jobs) seen.jobs.push(await run(page, job));
  seen.mistyped = await run(page, { prompt: plan.mistyped });
});

// what the worker computes, as numbers
seen.answers = await visit(plan.site, (page) =>
  page.evaluate(async ({ prompt, other, steps, sampling, column, written, position, changed, mistakes }) => {
    const { startWorker } = await import("./client.js");
    const on = [];
    const worker = startWorker((event, data) => event === "step" && on.push(data.on.id));
    await worker.call("load");
    await worker.call("begin", prompt, { ...sampling, seed: BigInt(sampling.seed) });
    await worker.call("advance", steps);
    const answers = { on, ...(await worker.call("look")), mistakes: {} };
    answers.hidden = await worker.call("changeCache", { hidden: column });
    answers.written = await worker.call("changeCache", { column, id: written });
    answers.influences = [...(await worker.call("influences"))];
    answers.changed = (await worker.call("changeText", position, changed)).map((layer) => [...layer]);
    answers.guess = await worker.call("guess", steps);
    for (const name of mistakes) answers.mistakes[name] = (await worker.call("mistake", name, other, steps)).ids;
    return answers;
  }, plan.questions),
);

// step by step, stopped and gone on with
await visit(plan.site, async (page) => {
  await fill(page, plan.jobs[0]);
  seen.steps = [];
  for (let i = 0; i < 3; i++) {
    await page.click("#step");
    seen.steps.push(await result(page));
  }
  await page.locator("#speed").fill("20");
  await page.click("#run");
  await page.waitForFunction(() => document.getElementById("continuation").textContent.length > 5);
  await page.click("#stop");
  seen.stopped = await result(page);
  await page.locator("#speed").fill("100");
  await page.click("#run");
  seen.goneOn = await result(page);
});

// the tools below the text, and the address, which another reader opens
await visit(plan.site, async (page) => {
  const { address } = await run(page, plan.jobs[3]);
  await page.click("#take-out");
  await page.locator("#next .after").first().waitFor();
  await page.click("#guess");
  await page.check('[value="too far"]');
  seen.verdicts = {
    change: await said(page, "#change-verdict"),
    guess: await said(page, "#guess-verdict"),
    mistake: await said(page, '.mistake:has([value="too far"]) output span'),
  };
  seen.linked = await visit(plan.site + address, (page) => run(page, {}));
});
const phone = { viewport: { width: 320, height: 640 } };
seen.width = await visit(plan.site, (page) => page.evaluate(() => document.documentElement.scrollWidth), phone);

// folders that something is wrong with
seen.broken = {};
for (const [name, url] of Object.entries(plan.broken)) {
  seen.broken[name] = await visit(url, result, { complaints: [] }); // the browser complains of the missing file, too
}

await browser.close();
console.log(JSON.stringify(seen));
