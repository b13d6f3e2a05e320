// Uses the exported page in headless Chromium, as a reader would, and prints what it saw as JSON.
//
//     node extras/web/tests/visit.mjs PLAN        PLAN, as JSON: see test_web.py
//
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../package.json", import.meta.url))("playwright-core");
const plan = JSON.parse(process.argv[2]);
const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath: plan.chromium, args });
const seen = { requests: [], complaints: [] };

/** Open the page, wait until it has loaded, and `work`. meanwhile: what to do while the model is loading. */
async function visit(url, work, meanwhile) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 720 }, reducedMotion: "reduce" });
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => seen.complaints.push(`uncaught: ${error}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && seen.complaints.push(line.text()));
  let arrive;
  const arrived = new Promise((resolve) => (arrive = resolve));
  if (meanwhile) {
    await page.route("**/model.onnx.gz?*", async (route) => {
      await arrived;
      await route.continue();
    });
  }
  await page.goto(url);
  await meanwhile?.(page);
  arrive();
  await idle(page);
  await speed(page, 100);
  await work(page);
  await page.close();
}

/** 100 is as fast as possible, and 28 is four characters per second. */
async function speed(page, value) {
  await page.evaluate((value) => {
    document.getElementById("speed").value = value;
    document.getElementById("speed").dispatchEvent(new Event("input"));
  }, value);
}

/** Wait until the page is waiting for the reader. */
async function idle(page) {
  await page.waitForFunction(() => !["loading", "preparing", "running"].includes(document.body.dataset.state));
  await drawn(page);
}

/** Wait until the newest state has been drawn. */
async function drawn(page) {
  await page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
}

async function fill(page, values) {
  await page.evaluate(() => (document.getElementById("settings").open = true));
  for (const [name, value] of Object.entries(values)) await page.locator(`[name=${name}]`).fill(value);
  await page.keyboard.press("Escape"); // closes the settings
}

/** Return what the reader sees, once the page is idle. */
async function result(page) {
  await idle(page);
  return page.evaluate(() => {
    const text = (id) => document.getElementById(id).textContent.trim().replace(/\s+/g, " ");
    return {
      text: document.getElementById("text").textContent,
      status: text("status"),
      message: text("message"),
      about: text("about"),
      ends: ["end-0", "end-1"].map(text),
      rows: ["rows-off", "rows-on"].map((id) => Number(text(id).replaceAll(",", ""))),
      name: text("next-name"),
      next: [...document.querySelectorAll("#next li")].map((item) => item.textContent),
      state: document.body.dataset.state,
      step: document.body.dataset.step,
      focus: document.activeElement.name || document.activeElement.id,
      address: location.search,
    };
  });
}

async function run(page, values) {
  await fill(page, values);
  await page.click("#run");
  return result(page);
}

async function step(page, number) {
  await page.click(`nav a >> nth=${number - 1}`);
  await page.waitForFunction((number) => document.body.dataset.step === String(number), number);
  await idle(page);
}

/** Return the text of an element, once it has some that includes `part`. */
async function said(page, selector, part = "") {
  await page.waitForFunction(
    ([selector, part]) => {
      const text = document.querySelector(selector)?.textContent;
      return text && text.includes(part);
    },
    [selector, part],
  );
  await drawn(page);
  return page.locator(selector).first().textContent();
}

/** Wait until all mistakes have an answer. */
async function mistakes(page) {
  await page.waitForFunction(() => [...document.querySelectorAll("#mistakes small")].every((each) => each.textContent));
  await drawn(page);
}

// the first picture, before the model has arrived and afterwards; and where the labels are
const opening = async (page) => {
  await drawn(page);
  const labels = await page.locator(".name, .end, form").evaluateAll((each) =>
    each.filter((it) => it.innerText).map((it) => [it.innerText[0], it.getBoundingClientRect().y]),
  );
  await said(page, "#verdict-1");
  const picture = ["text", "verdict-1", "next"].map((id) => page.locator(`#${id}`).textContent());
  seen.opening.push([await Promise.all(picture), labels]);
};
seen.opening = [];

// the lesson, from its beginning to its end
await visit(
  plan.site,
  async (page) => {
    await opening(page);
    seen.jobs = [];
    for (const job of plan.jobs) seen.jobs.push(await run(page, job));
    seen.mistyped = await run(page, { prompt: "a#b€#" });
    await run(page, { ...plan.jobs[0], max_new_tokens: "24" });

    // step 1: what is under the pointer
    await page.click("#layer label >> nth=0");
    await page.click("#head label >> nth=0");
    seen.marked = [];
    for (const place of ["#cells button", "#text span"]) {
      await page.locator(place).nth(plan.marked).hover();
      seen.marked.push(await result(page));
    }
    await page.mouse.move(1, 1);
    seen.unmarked = await result(page);
    await page.locator("#cells button").nth(2).click();
    seen.taken = await said(page, "#verdict-1", "column 3,");

    // step 2: step by step, paused and continued, and a race
    await fill(page, plan.jobs[0]);
    await page.click("text=Next");
    await idle(page);
    seen.prepared = await result(page);
    await page.click("#one");
    seen.one = await result(page);
    await speed(page, 28);
    await page.click("#run");
    await page.waitForFunction((count) => document.getElementById("text").children.length > count, seen.one.text.length + 2);
    await page.click("#run");
    seen.paused = await result(page);
    await page.click("#back");
    seen.back = await result(page);
    await speed(page, 100);
    await page.evaluate(() => {
      window.nexts = [];
      const watch = () => {
        const isRace = document.body.dataset.state === "running" && document.body.dataset.racing === "on";
        if (isRace) window.nexts.push(document.getElementById("next-step").hidden);
        requestAnimationFrame(watch);
      };
      watch();
    });
    await page.click("[data-times='40']");
    seen.race = await result(page);
    seen.race.said = await page.locator("#time-off, #time-on, #speeds").allTextContents();
    seen.race.nexts = await page.evaluate(() => window.nexts);

    // step 3
    await page.click("text=Next");
    await idle(page);
    await page.click("[data-expected=right]");
    seen.change = [await said(page, "#verdict-3"), (await result(page)).ends];
    await page.waitForFunction(() => location.search.includes("change")); // the address changes a little later
    await page.click("#layer label >> nth=0");
    seen.change.push(await said(page, "#verdict-3", "layer 1"), (await result(page)).ends);

    // step 4
    await page.click("text=Next");
    await mistakes(page);
    seen.mistakes = [];
    for (const radio of await page.locator("#mistakes input").all()) {
      await radio.check({ force: true });
      await drawn(page);
      seen.mistakes.push([await page.locator("#verdict-4").textContent(), await page.locator("#bug").textContent()]);
    }
    seen.right = await page.locator("#text span").evaluateAll((each) => each.map(({ dataset }) => dataset.correct));

    // step 5
    await page.click("text=Next");
    seen.scale = [await said(page, "#scale-token"), await said(page, "#scale-text")];
    await page.locator("#scale-heads").fill("32");
    seen.scale.push(await said(page, "#scale-token"));
    await page.locator("#scale-model").selectOption("Llama 3 70B");
    seen.scale.push(await said(page, "#scale-sharing"));
    await page.locator("#scale-tokens").fill("");
    seen.scale.push(await page.locator("#scale-result").isVisible());
    await page.goBack();
    await page.waitForFunction(() => document.querySelector("#verdict-4").textContent);
    seen.returned = await result(page);
    await page.evaluate(() => [3, 5].forEach((number) => (location.hash = `step-${number}`)));
    await page.waitForFunction(() => !location.search.includes("mistake")); // the address of step 3 never changed
    await page.goBack();
    await page.waitForFunction(() => document.body.dataset.step === "3");
    seen.reloaded = await page.evaluate(() => !("nexts" in window));
  },
  async (page) => {
    await page.locator("#cells .fresh").waitFor();
    await page.click("#take"); // and the answer is there again when the model has arrived
    await opening(page);
  },
);

// a link to a moment, and a mistake in the form that is mended
await visit(plan.site + plan.moment, async (page) => {
  const verdict = await said(page, "#verdict-3");
  await page.waitForFunction(() => !location.search.includes("layer")); // it changes a little later
  seen.moment = [verdict, (await result(page)).address];
  await fill(page, { temperature: "abc" });
  await drawn(page);
  seen.refused = await result(page);
  await fill(page, { temperature: "0.8" });
  seen.mended = await result(page);
});

// with the keyboard only
await visit(plan.site, async (page) => {
  const press = async (key, times = 1) => {
    for (let i = 0; i < times; i++) await page.keyboard.press(key);
  };
  const focus = async (selector) => {
    for (let i = 0; i < 40; i++) {
      if (await page.evaluate((selector) => document.activeElement.matches(selector), selector)) return;
      await press("Tab");
    }
  };
  await focus("[name=prompt]");
  await press("Control+A");
  await page.keyboard.type("Abe, ");
  await press("Enter");
  seen.keyboard = { run: await result(page) };
  await focus("#cells button");
  await press("Home");
  await press("ArrowRight", 2);
  seen.keyboard.marked = await result(page);
  await press("End");
  seen.keyboard.end = await result(page);
  await press("ArrowLeft", 3);
  await press("Enter");
  seen.keyboard.taken = await said(page, "#verdict-1");

  // readers with different needs: does the page fit, and can they see what is on it?
  seen.readers = {};
  for (const [name, { viewport, projector = false, textSize = 100, ...media }] of Object.entries(plan.readers)) {
    await page.setViewportSize(viewport);
    await page.emulateMedia({ colorScheme: "light", forcedColors: "none", reducedMotion: "reduce", ...media });
    await page.evaluate((size) => (document.documentElement.style.fontSize = size), textSize === 100 ? "" : `${textSize}%`);
    if (projector !== (await page.evaluate(() => "projector" in document.body.dataset))) await page.click("#projector");
    const [widths, bottoms] = [[], []];
    for (const number of [4, 3, 1, 2]) {
      await step(page, number);
      await drawn(page);
      widths.push(await page.evaluate(() => document.documentElement.scrollWidth));
      const ends = (each) => Math.max(...each.map((it) => it.getBoundingClientRect().bottom + scrollY));
      bottoms.push(await page.locator("#row-1, #next, .go").evaluateAll(ends));
    }
    seen.readers[name] = await page.evaluate(() => {
      const $ = (id) => document.getElementById(id);
      const fed = document.querySelectorAll("#cells button:enabled").length;
      const light = (i, row) => getComputedStyle($(`row-${row}`).children[i]);
      const size = (id) => parseFloat(getComputedStyle($(id)).fontSize);
      const both = ({ color, backgroundColor }) => [color, backgroundColor];
      return {
        columns: $("cells").children.length,
        colours: [both(getComputedStyle($("run"))), both(getComputedStyle(document.body))],
        newest: [0, 1].map((row) => light(fed - 1, row).backgroundColor),
        before: [0, 1].map((row) => light(fed - 2, row).backgroundColor),
        ring: light(fed - 2, 1).borderTopColor,
        keys: $("keys").getBoundingClientRect().y + scrollY,
        labels: ["earlier", "asking", "end-1", "next-name"].map(size),
      };
    });
    Object.assign(seen.readers[name], { width: Math.max(...widths), bottom: Math.max(...bottoms) });
  }
});

await browser.close();
console.log(JSON.stringify(seen));
