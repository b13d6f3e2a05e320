// Uses the exported page in headless Chromium, as a reader would, and prints what there was to see, as JSON.
//
//     node web/tests/visit.mjs PLAN        PLAN, as JSON: see test_web.py
//
// The page plays by itself, but not for readers who want little motion. So they visit here, and nothing runs unasked.
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../package.json", import.meta.url))("playwright-core");
const plan = JSON.parse(process.argv[2]);
const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"];
const browser = await chromium.launch({ executablePath: plan.chromium, args });
const seen = { requests: [], complaints: [] };

/** Open the page, wait until it has loaded, and return what `work` makes of it. */
async function visit(url, work, { complaints = seen.complaints, ...options } = {}) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 720 }, reducedMotion: "reduce", ...options });
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => complaints.push(`uncaught: ${error}`));
  page.on("console", (line) => ["error", "warning"].includes(line.type()) && complaints.push(line.text()));
  await page.goto(url);
  if (!url.startsWith("file:")) await page.waitForFunction(() => document.body.dataset.state !== "loading");
  await speed(page, 100);
  const result = await work(page);
  await page.close();
  return result;
}

/** 100 is as fast as possible, and 28 four characters per second. */
async function speed(page, value) {
  await page.locator("#speed").fill(String(value));
}

async function fill(page, values) {
  await page.evaluate(() => (document.getElementById("settings").open = true));
  for (const [name, value] of Object.entries(values)) await page.locator(`[name=${name}]`).fill(value);
  await page.evaluate(() => (document.getElementById("settings").open = false));
}

/** Wait until the newest state has been drawn. */
async function drawn(page) {
  await page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
}

/** What is there to see, once the page is idle. */
async function result(page) {
  await page.waitForFunction(() => document.body.dataset.state !== "running");
  await drawn(page);
  return page.evaluate(() => {
    const text = (id) => document.getElementById(id).textContent.trim().replace(/\s+/g, " ");
    return {
      text: document.getElementById("text").textContent,
      status: text("status"),
      message: text("message"),
      about: text("about"),
      rows: ["rows-off", "rows-on"].map((id) => Number(text(id).replaceAll(",", ""))),
      factor: text("factor"),
      name: text("next-name"),
      next: [...document.querySelectorAll("#next li")].map((item) => item.textContent),
      state: document.body.dataset.state,
      focus: document.activeElement.name || document.activeElement.id,
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

async function step(page, number) {
  await page.click(`nav a >> nth=${number - 1}`);
}

/** The text of an element, once it has some. */
async function said(page, selector) {
  await page.waitForFunction((selector) => document.querySelector(selector)?.textContent, selector);
  await drawn(page);
  return page.locator(selector).first().textContent();
}

// texts, and a mistake in the form
await visit(plan.site, async (page) => {
  seen.jobs = [];
  for (const job of plan.jobs) seen.jobs.push(await run(page, job));
  seen.mistyped = await run(page, { prompt: plan.mistyped });
  seen.mended = await run(page, plan.jobs[0]);
});

// what the worker computes and what the stage draws, as numbers
seen.answers = await visit(plan.site, (page) =>
  page.evaluate(async ({ prompt, steps, sampling, column, position, changed, mistakes }) => {
    const { startWorker } = await import("./client.js");
    const { keptColumns } = await import("./columns.js");
    const { attend } = await import("./attention.js");
    const { next } = await import("./generate.js");
    const on = [];
    const worker = startWorker((event, data) => event === "step" && on.push(data.on));
    const info = await worker.call("load");
    await worker.call("begin", 1, prompt, steps, { ...sampling, seed: BigInt(sampling.seed) });
    await worker.call("advance", Infinity, false);
    const kept = keptColumns(info);
    for (const { columns } of on) kept.add(columns);

    const lists = (arrays) => arrays.map((array) => [...array]);
    const layers = [...Array(info.n_layer).keys()];
    const heads = [...Array(info.n_head).keys()];
    const answers = {
      on: on.map(({ id }) => id),
      probabilities: on.map(({ probabilities }) => probabilities),
      kept: layers.map((layer) => [0, 1].map((kind) => lists([0, 1].map((head) => kept.lane(layer, kind, head))))),
      attention: layers.map((layer) =>
        heads.map((head) => {
          const query = on.at(-1).queries[layer].subarray(head * info.head_size, (head + 1) * info.head_size);
          const serving = Math.floor((head * info.n_kv_head) / info.n_head);
          const { weights, mix } = attend(query, kept.lane(layer, 0, serving), kept.lane(layer, 1, serving));
          return [weights, [...mix]];
        }),
      ),
      mistakes: {},
    };
    const without = async (columns) => {
      const { hidden, moved, probabilities } = await worker.call("without", columns);
      return { hidden, moved, probabilities };
    };
    answers.without = await without([column]);
    answers.most = await without([...Array(prompt.length + steps - 2).keys()]);
    const change = await worker.call("change", position, changed);
    answers.change = { differences: lists(change.differences), probabilities: change.probabilities };
    answers.guess = await worker.call("guess");
    for (const name of mistakes) {
      const { columns, queries, differences, ...mistake } = await worker.call("mistake", name);
      answers.mistakes[name] = { ...mistake, differences: lists(differences), columns: columns[0].length / 2 / info.head_size };
    }
    const [ahead, slow] = [{ ids: [0, 1], ms: 1 }, { ids: [0], ms: 5 }];
    answers.next = [false, true].map((racing) => next({ on: ahead, off: slow, total: 3 }, racing));
    answers.next.push(next({ on: { ids: [0, 1, 2], ms: 1 }, off: slow, total: 3 }, true));
    return answers;
  }, plan.questions),
);

// the stage: characters that are marked, and the four steps of the lesson
await visit(plan.site, async (page) => {
  const job = { ...plan.jobs[0], max_new_tokens: "30" };
  await run(page, job);
  seen.stage = { marked: [], boxes: [] };
  const box = () =>
    page.evaluate(() =>
      ["text", "strip", "next", "status", "mistakes"].map((id) => {
        const { x, y, bottom } = document.getElementById(id).getBoundingClientRect();
        return [x, y, id === "status" ? y : bottom];
      }),
    );
  seen.stage.boxes.push(await box());
  await page.click("#layer label >> nth=0");
  await page.locator("#cells button").nth(plan.marked).hover();
  seen.stage.marked.push(await result(page));
  await page.locator("#text span").nth(plan.marked).hover();
  seen.stage.marked.push(await result(page));
  await page.mouse.move(1, 1);
  seen.stage.unmarked = await result(page);

  await page.click("#without");
  seen.stage.without = [await said(page, "#without-verdict"), await result(page)];
  await step(page, 3);
  seen.stage.boxes.push(await box());
  await page.click("#change");
  seen.stage.change = await said(page, "#change-verdict");
  for (const letter of "abcdefgabcdefgabcdefgabc") await page.locator("#changed").selectOption(letter);
  await page.locator("#changed").selectOption("q");
  await page.waitForFunction(() => document.getElementById("text").textContent.includes("q"));
  seen.stage.changeLast = await result(page);
  await step(page, 4);
  await page.waitForFunction(() => [...document.querySelectorAll("#mistakes small")].every((each) => each.textContent));
  seen.stage.mistakes = {};
  for (const name of plan.questions.mistakes) {
    await page.locator(`[value="${name}"]`).check({ force: true });
    seen.stage.mistakes[name] = [await said(page, "#mistake-verdict"), (await result(page)).text];
  }
  seen.stage.boxes.push(await box());
  await page.click("footer summary >> text=Guess ahead");
  await page.click("#guess");
  seen.stage.guess = await said(page, "#guess-verdict");
  await page.click("#one"); // the run again, from the start
  seen.stage.again = await result(page);
  seen.stage.boxes.push(await box());
});

// step by step, paused and gone on with; another prompt while it runs; races
await visit(plan.site, async (page) => {
  const longer = (count) =>
    page.waitForFunction((count) => document.getElementById("text").children.length > count, count);
  const { prompt } = plan.jobs[0];
  await fill(page, plan.jobs[0]);
  seen.steps = [];
  for (let i = 0; i < 3; i++) {
    await page.click("#one");
    seen.steps.push(await result(page));
  }
  await speed(page, 28);
  await page.click("#run");
  await longer(prompt.length + 5);
  await page.click("#run");
  seen.paused = await result(page);
  await speed(page, 100);
  await page.click("#run");
  seen.goneOn = await result(page);

  await page.click("#race");
  await page.click("#race");
  seen.race = await result(page);
  await page.click("#run");
  seen.afterRace = await result(page);

  await speed(page, 28);
  await page.click("#run");
  await longer(prompt.length + 2);
  await page.locator("[name=prompt]").fill("Dead Caesar");
  seen.edited = await result(page);
  await speed(page, 100);
  await page.click("#run");
  seen.afterEdit = await result(page);
});

// by keyboard alone
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
});

// the address, which another reader opens
await visit(plan.site, async (page) => {
  const { address } = await run(page, plan.jobs[3]);
  seen.linked = await visit(plan.site + address, (page) => run(page, {}));
});

// readers, by what they want: does the page play by itself, does it fit, and can they see what is on it?
seen.readers = {};
for (const [name, { textSize = 100, ...options }] of Object.entries(plan.readers)) {
  const look = async (page) => {
    const state = await page.evaluate(() => document.body.dataset.state);
    if (options.reducedMotion === "no-preference") {
      await page.waitForFunction((given) => document.getElementById("text").children.length > given, plan.jobs[0].prompt.length);
    }
    await page.evaluate((size) => (document.documentElement.style.fontSize = size), textSize === 100 ? "" : `${textSize}%`);
    await run(page, { ...plan.jobs[0], max_new_tokens: "12" });
    const widths = [];
    for (const number of [1, 2, 3, 4]) {
      await step(page, number);
      await drawn(page);
      widths.push(await page.evaluate(() => document.documentElement.scrollWidth));
    }
    await step(page, 2);
    await drawn(page);
    return page.evaluate(
      ([state, widths]) => {
        const run = getComputedStyle(document.getElementById("run"));
        const fed = document.querySelectorAll("#cells button:enabled").length;
        const light = (i, row) => getComputedStyle(document.getElementById(`row-${row}`).children[i]).backgroundColor;
        return {
          state,
          width: Math.max(...widths),
          colours: [run.color, run.backgroundColor],
          page: [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor],
          newest: [light(fed - 1, 0), light(fed - 1, 1)],
          before: [light(fed - 2, 0), light(fed - 2, 1)],
        };
      },
      [state, widths],
    );
  };
  seen.readers[name] = await visit(plan.site, look, options);
}

// folders that something is wrong with
seen.broken = {};
for (const [name, url] of Object.entries(plan.broken)) {
  seen.broken[name] = await visit(url, result, { complaints: [] }); // the browser complains of the missing file, too
}

await browser.close();
console.log(JSON.stringify(seen));
