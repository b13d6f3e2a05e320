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
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const complaints = [];
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => complaints.push(`uncaught: ${error}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && complaints.push(line.text()));
  await page.goto(url);
  await page.waitForFunction(() => document.body.dataset.state !== "loading");
  return { page, complaints, close: () => context.close() };
}

async function visit(url, options, work) {
  const { page, complaints, close } = await open(url, options);
  const result = await work(page);
  seen.complaints.push(...complaints);
  await close();
  return result;
}

async function fill(page, values) {
  await page.evaluate(() => (document.getElementById("settings").open = true));
  for (const [name, value] of Object.entries(values)) await page.locator(`[name=${name}]`).fill(String(value ?? ""));
}

/** What is there to see, once the page is idle. */
async function result(page) {
  await page.waitForFunction(() => document.body.dataset.state !== "running");
  return page.evaluate(() => {
    const text = (id) => document.getElementById(id)?.textContent;
    return {
      text: text("given") + text("continuation") + text("newest"),
      newest: text("newest"),
      status: text("status"),
      message: text("message"),
      invalid: [...document.querySelectorAll("[aria-invalid]")].map((field) => field.name),
      focus: document.activeElement.name,
      described: document.activeElement.getAttribute("aria-describedby"),
      points: ["off", "on"].map((setting) => document.getElementById(`curve-${setting}`).points.length),
      rows: ["off", "on"].map((setting) => Number(text(`rows-${setting}`).replaceAll(",", ""))),
      bytes: text("bytes"),
      chart: document.getElementById("chart").getAttribute("aria-label"),
      shapes: [...document.querySelectorAll("#shapes tbody tr")].map((row) =>
        [...row.children].map((cell) => cell.textContent),
      ),
      address: location.search,
    };
  });
}

const untilText = (page, id) =>
  page.waitForFunction((id) => document.getElementById(id).textContent, id, { timeout: 60_000 });

// texts
await visit(plan.site, {}, async (page) => {
  seen.before = await result(page);
  seen.jobs = [];
  for (const job of plan.jobs) {
    await fill(page, job);
    await page.click("#run");
    seen.jobs.push(await result(page));
  }
  await page.locator("#chart").screenshot({ path: plan.picture });
  seen.mistakes = [];
  for (const values of plan.mistakes) {
    await fill(page, { ...plan.jobs[0], ...values });
    await page.click("#run");
    seen.mistakes.push(await result(page));
  }
});

// what is said while the files arrive
seen.loading = await visit("about:blank", {}, async (page) => {
  await page.addInitScript(() => {
    window.said = [];
    const note = () => window.said.push(document.getElementById("status")?.textContent);
    new MutationObserver(note).observe(document, { subtree: true, childList: true, characterData: true });
  });
  await page.goto(plan.site);
  await page.waitForFunction(() => document.body.dataset.state === "ready");
  return page.evaluate(() => window.said);
});

// step by step, stopped and gone on with, clicked twice
await visit(plan.site, {}, async (page) => {
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
  await page.dblclick("#run");
  await page.click("#run");
  seen.twice = await result(page);
  await page.locator("[name=prompt]").focus();
  await page.evaluate(() => document.querySelector("[name=seed]").focus());
  for (const repeat of [false, true, true, true]) {
    await page.evaluate((repeat) => {
      const key = new KeyboardEvent("keydown", { key: "Enter", repeat, bubbles: true, cancelable: true });
      const accepted = document.activeElement.dispatchEvent(key);
      if (accepted) document.getElementById("form").requestSubmit();
    }, repeat);
  }
  seen.held = await result(page);
});

// the cache: a column taken out, a column written, a character changed, guesses, mistakes
seen.cache = await visit(plan.site, {}, async (page) => {
  const cache = {};
  await fill(page, plan.cache.request);
  await page.click("#run");
  await result(page);
  await page.waitForFunction(() => / of the probability/.test(document.getElementById("influences").ariaLabel));
  cache.influences = await page.locator("#influences").getAttribute("aria-label");
  cache.again = await page.locator("#again").textContent();
  await untilText(page, "change-verdict");
  cache.unasked = await page.locator("#change-verdict").textContent();
  const bars = async () => {
    await page.waitForTimeout(200);
    await page.waitForFunction(() => /→/.test(document.querySelector("#next tbody").textContent));
    return page.evaluate(() =>
      [...document.querySelectorAll("#next tbody tr")].map((row) => [
        row.children[0].textContent,
        ...[...row.querySelectorAll(".bar span")].map((bar) => parseFloat(bar.style.width) / 100),
      ]),
    );
  };
  await page.locator("#column").fill(String(plan.cache.column));
  await page.click("#take-out");
  cache.takenOut = await bars();
  await page.click("#take-out");
  await page.locator("#written").selectOption(String(plan.cache.written));
  cache.written = await bars();
  await page.locator("#position").fill(String(plan.cache.position));
  await page.locator("#changed").selectOption(String(plan.cache.changed));
  await untilText(page, "change-verdict");
  await page.waitForTimeout(300);
  cache.changed = await page.evaluate(() =>
    [...document.querySelectorAll("#changes tr")].map((row) => row.children[2].textContent),
  );
  cache.verdict = await page.locator("#change-verdict").textContent();
  await page.click("#guess");
  await untilText(page, "guess-verdict");
  cache.guesses = await page.locator("#guess-verdict").textContent();
  cache.guessed = await page.evaluate(() => {
    const kept = document.getElementById("guessed").cloneNode(true);
    for (const struck of kept.querySelectorAll("s")) struck.remove();
    return kept.textContent;
  });
  cache.mistakes = {};
  for (const name of plan.cache.mistakes) {
    await page.check(`[value="${name}"]`);
    const output = page.locator(".mistake", { has: page.locator(`[value="${name}"]`) }).locator("output");
    await output.locator("span").waitFor();
    cache.mistakes[name] = await output.textContent();
  }
  return cache;
});

// what phones type; the address; a character that looks like markup
seen.typed = await visit(plan.site, {}, async (page) => {
  await fill(page, plan.typed);
  await page.click("#run");
  const typed = await result(page);
  const reloaded = await visit(plan.site + typed.address, {}, async (page) => {
    const values = await page.evaluate(() =>
      Object.fromEntries([...document.forms[0].elements].filter((f) => f.name).map((f) => [f.name, f.value])),
    );
    await page.click("#run");
    return { values, ...(await result(page)) };
  });
  return { ...typed, reloaded };
});
seen.markup = await visit(plan.markup, {}, async (page) => {
  const count = () => page.evaluate(() => document.querySelectorAll("img, b, i, script").length);
  const before = await count();
  await fill(page, { prompt: "<b><i>&", temperature: "2" });
  await page.click("#run");
  const run = await result(page);
  await page.click("#take-out");
  await page.check('[value="too far"]');
  await page.locator(".mistake output span").first().waitFor();
  return { ...run, added: (await count()) - before };
});

// the keyboard alone, and the accessibility tree
seen.keyboard = await visit(plan.site, {}, async (page) => {
  const { keyboard } = page;
  const tabs = [];
  const tab = async (...keys) => {
    await keyboard.press("Tab");
    tabs.push(
      await page.evaluate(() => {
        const { name, id, labels, textContent, tagName } = document.activeElement;
        const label = document.activeElement.ariaLabel || labels?.[0]?.textContent.trim() || textContent.trim();
        return { field: name || id || tagName, label, ring: getComputedStyle(document.activeElement).outlineStyle };
      }),
    );
    for (const key of keys) await (key.length > 1 ? keyboard.press(key) : keyboard.type(key));
  };
  for (let i = 0; i < 3; i++) await tab(); // the links to the code
  await tab("Control+a", ...plan.keys.prompt);
  await tab("Enter"); // the settings unfold
  await tab();
  await tab();
  await tab("Control+a", ...plan.keys.seed);
  await tab(...plan.keys.max_new_tokens);
  await tab("Enter"); // Run both
  const run = await result(page);
  for (let i = 0; i < 6; i++) await tab();
  return { tabs, run, tree: await page.locator("body").ariaSnapshot() };
});

// how it looks
seen.looks = {};
for (const [name, options] of Object.entries(plan.looks)) {
  seen.looks[name] = await visit(plan.site, options, async (page) => {
    await page.evaluate((size) => (document.documentElement.style.fontSize = size), options.fontSize ?? "");
    const folded = await page.evaluate(() => document.querySelectorAll("main details:not([open])").length);
    await fill(page, { prompt: "# ".repeat(99) }); // a message, and a long one
    await page.click("#run");
    const { message } = await result(page);
    await fill(page, { prompt: "" });
    await page.click("#run");
    await result(page);
    await untilText(page, "change-verdict");
    await page.evaluate(() => {
      for (const details of document.querySelectorAll("details")) details.open = true;
      window.scrollTo(0, document.body.scrollHeight);
    });
    // what was drawn while it was folded is drawn again
    const drawn = () => [...document.querySelectorAll("#changes canvas")].every((canvas) => canvas.width > 0);
    await page.waitForFunction(drawn);
    return page.evaluate(
      ([message, folded]) => {
        document.getElementById("message").textContent = message;
        const style = (selector) => getComputedStyle(document.querySelector(selector));
        const readable = ["body", "#model", "#status", "label", "b.on", "b.off", "thead th"];
        const { top, bottom } = document.getElementById("step").getBoundingClientRect();
        const clipped = [...document.querySelectorAll("input:not([type]), button, label, th, dd, p")].filter(
          (element) => element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).overflowX !== "visible",
        );
        return {
          width: document.documentElement.scrollWidth,
          folded,
          inReach: top >= 0 && bottom <= innerHeight,
          clipped: clipped.map((element) => element.outerHTML.slice(0, 80)),
          background: style("body").backgroundColor,
          inks: Object.fromEntries(readable.map((selector) => [selector, style(selector).color])),
          lines: Object.fromEntries(["off", "on"].map((setting) => [setting, style(`#curve-${setting}`).stroke])),
          dashes: ["off", "on"].map((setting) => style(`#curve-${setting}`).strokeDasharray),
        };
      },
      [message, folded],
    );
  });
}

// folders that something is wrong with, and a browser without JavaScript
seen.broken = {};
for (const [name, url] of Object.entries(plan.broken)) {
  const { page, complaints, close } = await open(url);
  const disabled = await page.locator("#run:disabled, #step:disabled").count();
  seen.broken[name] = { ...(await result(page)), complaints, disabled };
  await close();
}
{
  const context = await browser.newContext({ javaScriptEnabled: false });
  const page = await context.newPage();
  await page.goto(plan.site);
  seen.withoutJavaScript = await page.locator("#status").textContent();
  await context.close();
}

await browser.close();
console.log(JSON.stringify(seen));
